"""Settings from outside: the YAML file of `quire serve --config`, flags of other engines, and help texts."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from quire.cli import elsewhere, generate, serve
from quire.cli.config_file import read_config
from quire.cli.flags import add_flags, engine_settings, given, split_model
from quire.cli.main import main
from quire.config import EngineConfig
from quire.serve.settings import ServeConfig
from quire.types import ConfigError


def config_of(tmp_path: Path, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    settings, config = read_config(str(file), (ServeConfig, EngineConfig))
    return settings, config


def test_values_of_a_config_file_are_those_of_the_flags(tmp_path: Path) -> None:
    settings, config = config_of(
        tmp_path,
        "port: '80'\napi-key: secret\nserved_model_name: [one, two]\nrequest-timeout: 5\nstrict: on\n"
        "api-key-file:\nmax-model-len: 1k\ndtype: float32\nprefix-caching: off\nmemory-utilization: 0.5\n",
    )
    assert settings == {
        "port": 80,
        "api_key": ["secret"],  # one key, not one for each of its letters
        "served_model_name": ["one", "two"],
        "request_timeout": 5.0,
        "strict": True,
        "api_key_file": None,
    }
    assert config == {
        "max_model_len": 1024, "dtype": "float32", "prefix_caching": False, "memory_utilization": 0.5
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: http", "port must be an integer, got 'http'"),
        ("port:", "port must be an integer, got None"),
        ("max-waiting: true", "max-waiting must be an integer, got True"),
        ("max-num-seqs: 4.5", "max-num-seqs must be an integer, got 4.5"),
        ("strict: 'no'", "strict must be true or false, got 'no'"),
        ("request-timeout: 5s", "request-timeout must be a number, got '5s'"),
        ("host: 5", "host must be a text: put it in quotes, got 5"),
        ("api-key: [a, 0123]", "api-key must be a text: put it in quotes"),
        ("api-key: {a: b}", "api-key must be a text: put it in quotes"),
        ("prot: 1", "'prot', which is no flag"),
        ("enforce-eager: true", "no flag of quire serve; here it is --no-cuda-graphs"),
        ("- port", "must hold flags and their values"),
        ("a: [", "cannot be read"),
    ],
)
def test_mistakes_in_a_config_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_of(tmp_path, text)


SEVERAL = [
    (["demo", "--api-key", "a", "b", "--api-key", "c"], {"api_key": ["a", "b", "c"]}),
    (["demo", "--served-model-name", "a", "b", "--port", "1"], {"served_model_name": ["a", "b"], "port": 1}),
    (["--served_model_name=a", "demo"], {"served_model_name": ["a"]}),
    (
        ["demo", "--allowed-origins", '["http://a", "http://b"]'],
        {"allowed_origins": ["http://a", "http://b"]},
    ),
    (["demo", "--allowed-origins", "[*"], {"allowed_origins": ["[*"]}),
]


@pytest.mark.parametrize(("flags", "expected"), SEVERAL)
def test_flags_of_lists_take_several_values(flags: list[str], expected: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(flags)
    assert args.model_name == "demo" and given(args, ServeConfig) == expected


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name"])
def test_a_model_behind_several_values_is_not_taken_for_one(flag: str) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(ConfigError, match=f"the last value of {flag} may be meant as the model"):
        serve.run(parser.parse_args([flag, "a", "secret"]))


def flags_of(*commands: Any) -> set[str]:
    found: set[str] = set()
    for command in commands:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        found |= {flag for action in parser._actions for flag in action.option_strings}
    return found


def test_flags_that_are_called_otherwise_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    flags = flags_of(serve, generate)
    assert (
        not flags & {*elsewhere.NAMES, *elsewhere.NEEDLESS}
        and {name.split()[0] for name in elsewhere.NAMES.values()} <= flags
    )
    for flag, says in (
        ("--gpu_memory_utilization=0.9", "here it is --memory-utilization"),
        ("--enable-auto-tool-choice", "leave it out: this is always on here"),
        ("--trust-remote-code", "Quire never runs code from checkpoints"),
        ("--max-num-seq", "did you mean --max-num-seqs?"),
    ):
        with pytest.raises(SystemExit):
            main(["serve", "demo", flag])
        assert f"unrecognized arguments: {flag}; {says}\n" in capsys.readouterr().err


def test_help_says_the_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, "server", ServeConfig)
    add_flags(parser, "engine", EngineConfig)
    text = " ".join(parser.format_help().split())
    for said in (
        "0 picks a free port and prints it (default: 8000)",
        "(default: 127.0.0.1)",
        "live view at / (default: on)",
        "--dtype {auto,float32,bfloat16,float16} number format of weights and activations; auto follows the checkpoint "
        "(default: auto)",
    ):
        assert said in text
    assert "answering with a warning (default: off)" in text
    assert "default: None" not in text and "default: <" not in text
    assert all(line.count("(default") <= 1 for line in re.split(r" (?=--)", text))


def test_help_lists_each_switch_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and text.startswith("usage: quire generate [[MODEL] PROMPT ...] [flags]\n")
    for flag in ("--max-tokens", "--block-size", "--overlap", "--model"):
        assert len(re.findall(rf"(?<![\w-]){flag}(?![\w-])", text.split("options:")[1])) == 1
    assert "--max_tokens" not in text and "-m, --model STR" in text
    text = " ".join(text.split())
    assert "(default: 1024)" in text and "(default: that of the model, or 1.0)" in text


@pytest.mark.parametrize(
    ("flag", "feature"),
    [
        ("--split-mode", "other splits of a model than tensor, pipeline and expert parallelism"),
        ("--load-in-4bit", "the formats of bitsandbytes"),
        ("--enable-lora", "LoRA"),
    ],
)
def test_flags_of_missing_features(capsys: pytest.CaptureFixture[str], flag: str, feature: str) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "demo", flag])
    assert f"{flag}; not available yet: Quire has no support for {feature}" in capsys.readouterr().err


def test_missing_flags_are_missing() -> None:
    missing = {flag for flags in elsewhere.MISSING.values() for flag in flags}
    assert not missing & (flags_of(serve, generate) | {*elsewhere.NAMES, *elsewhere.NEEDLESS})


WORDS = [
    (["demo", "Hi"], {}, "demo", ["Hi"]),
    (["Hi", "Ho"], {}, None, ["Hi", "Ho"]),
    (["Qwen/Qwen3-0.6B", "Hi"], {}, "Qwen/Qwen3-0.6B", ["Hi"]),
    (["and / or", "Hi"], {}, None, ["and / or", "Hi"]),
    (["model.gguf"], {}, "model.gguf", []),
    (["./folder", "Hi"], {}, "./folder", ["Hi"]),
    (["demo", "Hi"], {"model": "x"}, None, ["demo", "Hi"]),
    (["x" * 5000], {}, None, ["x" * 5000]),
    ([""], {}, None, [""]),
    ([], {}, None, []),
]


@pytest.mark.parametrize(("words", "flags", "model", "prompts"), WORDS)
def test_a_first_word_that_names_a_model(
    words: list[str], flags: dict[str, str], model: str | None, prompts: list[str]
) -> None:
    args = argparse.Namespace(**flags)
    assert split_model(words, args, always=False) == prompts and args.model_name == model


def test_the_first_word_of_a_chat_is_its_model() -> None:
    args = argparse.Namespace()
    assert split_model(["gpt2", "Hi"], args, always=True) == ["Hi"] and engine_settings(args) == {
        "model": "gpt2"
    }
    with pytest.raises(ConfigError, match="two models are named, a and --model b; name one"):
        engine_settings(argparse.Namespace(model_name="a", model="b"))


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        ([], 0, "  doctor      show what this machine has"),
        (["help"], 0, "commands:"),
        (["-v"], 0, "quire 0."),
        (["version"], 0, "quire 0."),
        (["srve"], 2, "there is no command 'srve'; did you mean `quire serve`?"),
        (["xyzzy"], 2, "there is no command 'xyzzy'; the commands are:"),
        (["--dtype"], 2, "there is no flag '--dtype'; flags follow the command"),
    ],
)
def test_the_list_of_commands(
    capsys: pytest.CaptureFixture[str], argv: list[str], code: int, says: str
) -> None:
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert says in (err if code else out) and (not out if code else not err)


@pytest.mark.parametrize("argv", [["help", "doctor"], ["run", "--help"], ["server", "-h"]])
def test_help_of_a_command_and_of_an_alias(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    known = {"doctor": "doctor", "run": "chat", "server": "serve"}
    name = next(known[word] for word in argv if word in known)
    assert stop.value.code == 0 and f"usage: quire {name} " in capsys.readouterr().out


def test_help_groups_the_settings_of_an_engine() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, "engine", EngineConfig)
    text = parser.format_help()
    groups = ["model:", "scheduling:", "KV cache:", "kernels and graphs:", "debugging:"]
    assert [line for line in text.splitlines() if line in groups] == groups, "a group is missing or split"
    assert "engine:" not in text, "a setting has no group"
