"""What docs/PLATFORMS.md says of operating systems, as far as it shows on this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.assembly import device
from quire.cli.main import main
from quire.quant import packed
from quire.types import ConfigError


def test_llm_works_without_what_windows_lacks(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"1\r\n2\n" * 200)
    script = Path(__file__).with_name("as_windows.py")
    done = subprocess.run([sys.executable, str(script), tmp_path / "lines"], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("Once upon")]
    assert lines == [
        "generate 8",
        "chat 8",
        "structured RequestError: structured_outputs need Linux or macOS: a specification is compiled in a forked "
        "process, which Windows lacks",
        "again 8",
        "process ConfigError: engine_process needs Linux or macOS; on Windows the engine runs in your own process",
        "read True",
        "command 0",
        "serve 2",
    ], done.stderr[-2000:]
    assert done.stderr.startswith("quire: quire serve needs Linux or macOS") and done.stderr.count("\n") == 1


def test_the_server_says_in_one_sentence_that_it_needs_another_system(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["serve", "demo"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("quire: quire serve needs Linux or macOS") and told.count("\n") == 1
    with pytest.raises(ConfigError, match="engine_process needs Linux or macOS"):
        LLM("demo", engine_process=True)


@pytest.mark.parametrize(("dtype", "used"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_a_cpu_without_bfloat16_generates(monkeypatch: pytest.MonkeyPatch, dtype: str, used: str) -> None:
    """As on CPUs with AVX2 only: the built-in model is stored in bfloat16, which oneDNN does not pack there."""

    def can_pack(dtype: torch.dtype = torch.float32) -> bool:
        return dtype != torch.bfloat16

    monkeypatch.setattr(packed, "can_pack", can_pack)
    monkeypatch.setattr(device, "can_pack", can_pack)
    with LLM("demo", device="cpu", dtype=dtype) as llm:
        assert llm.info.dtype == used
        [output] = llm.generate(
            "Once upon a time", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) == 12
