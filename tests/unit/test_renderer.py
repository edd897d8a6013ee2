"""Templates run in helper processes: hostile ones end in a clean error, without an effect on other renderings."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from quire.files.peak_memory import peak_bytes
from quire.frontend.templates import renderer as renderer_module
from quire.frontend.templates.helper_process import HelperEnded, HelperPool, HelpersBusy
from quire.frontend.templates.renderer import TemplateRenderer
from quire.types import Overloaded, RequestError

VARIABLES = {"messages": [{"role": "user", "content": "Hi"}]}
DOUBLED = "{% set n = namespace(x=[1]) %}{% for i in range(LEVELS) %}{% set n.x = [n.x, n.x] %}{% endfor %}"


def doubled(levels: int, then: str) -> str:
    """Build nested lists that hold the next level twice: small in memory, but 2 ** levels items when traversed."""
    return DOUBLED.replace("LEVELS", str(levels)) + then


HOSTILE = [
    "{% set x=[['a']*2000]*2000 %}{{ (x|sum(start=[]))|length }}",
    "{% set x=[['a']*4000]*4000 %}{{ (x|sum(start=[]))|length }}",
    doubled(22, "{{ n.x | tojson }}"),
    doubled(40, "{{ n.x | tojson }}"),
    doubled(40, "{{ n.x | string }}"),
    doubled(40, "{% set y = n.x %}" + doubled(40, "{{ y == n.x }}")),
    "{{ (range(100000) | list * 100) | sort | length }}",
    "{{ '{:999999999}'.format(1) | length }}",
    "{{ 1 }}" * 30_000,
    "{{ [" + "1," * 100_000 + "] }}",
    "{{ 'x' * 100000000 }}",
    "{% set x = 'a' * 1000000 %}{% for i in range(90000) %}{{ x }}{% endfor %}",
    "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x == [n.x] }}",
    "{{ 10 ** 10 ** 7 }}",
    "{{ (10 ** 1000000) | string }}",
    "{{ ('a ' * 5000000) | wordwrap(1) | length }}",
    "{{ ('http://' * 100000) | urlize }}",
    "{{ ('<' * 3000000) | striptags }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__.__globals__.os.system('x') }}",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}{{ raise_exception('x') }}",
    "{{ messages.append(1) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = b %}{% endfor %}{% endfor %}",
    "{% for a in range(99999999) %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% macro f(d) %}{% if d %}{{ f(d - 1) }}{{ f(d - 1) }}{% endif %}{% endmacro %}{{ f(300) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'a' * 99999999999 }}",
    "{{ 9 ** 999999999 }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '%99999999999d' | format(1) }}",
    "{{ '{:>99999999999}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 99999999999) }}",
    "{{ 'a'.ljust(99999999999) }}",
    "{{ 'a' | center(99999999999) }}",
    "{{ 'a\na' | indent(99999999999) }}",
    "{{ lipsum(n=100000) }}",
    "{{ ('a' * 1000000) | replace('a', 'a' * 1000000) }}",
    "{{ ('a' * 1000000).replace('a', 'a' * 1000000) }}",
    "{{ ('a' * 1000000) | list | join('b' * 1000000) }}",
    "{{ ('b' * 1000000).join('a' * 1000000) }}",
    "{{ (['a' * 1000000] * 90000) | join }}",
    "{{ ''.join(['a' * 1000000] * 90000) }}",
    "{{ [1] | batch(999999999, 'x') | list }}",
    "{{ [1] | tojson(indent=999999999) }}",
    "{{ '%.99999999999f' % 1 }}",
    "{{ '%*d' % (99999999999, 1) }}",
    "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "{% for x in [[1, 1]] recursive %}{% set y = [1, 1] %}{{ loop(y) }}{{ loop(y) }}{% endfor %}",
    "{% set n = range(99999) | list %}{% for a in n if a in n and 0 %}{% endfor %}{% for a in n %}{% for b in n if -1 in n %}{% endfor %}{% endfor %}",
    "{% set n = range(99999) | list %}{% for a in n %}{{ n | select('none') | list }}{% endfor %}",
    "{% for a in messages %}{% for b in 'x' * 9999999 %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{{ m.content + 5 }}{% endfor %}",
    "{{ nothing.at.all }}",
    "{{ 1 / 0 }}",
    "{% for m in messages %}",
    "{% include 'x' %}",
    "{{ x | nosuchfilter }}",
    "{" * 5000,
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
]


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    found = TemplateRenderer()
    yield found
    found.close()


def pids(found: TemplateRenderer) -> list[int]:
    return found.pids()


@pytest.fixture(autouse=True, scope="module")
def short_limits() -> Iterator[None]:
    before = renderer_module.CPU_S
    renderer_module.CPU_S = 0.3  # before the module's processes start
    yield
    renderer_module.CPU_S = before


@pytest.mark.parametrize("source", HOSTILE, ids=lambda s: f"{s[:50]}-{len(s)}")
def test_hostile_and_broken_templates_end(source: str, renderer: TemplateRenderer) -> None:
    """Hostile templates end in an error, or in a text if they stay within the limits. The next rendering works."""
    try:
        text = renderer.render(source, VARIABLES)
        assert len(text) <= 16_000_000
    except RequestError as error:
        assert str(error).startswith("the chat template")
        assert len(str(error)) < 1000
    assert renderer.render("{{ messages[0].content }}", VARIABLES) == "Hi"


def test_an_attack_slows_no_other_rendering(renderer: TemplateRenderer) -> None:
    """One of two processes runs an endless template, and the other one answers."""
    renderer.render("{{ 1 }}", {})
    attack = threading.Thread(target=lambda: outcome(renderer, "{{ 7 ** 999999999 }}"))
    attack.start()
    answers = 0
    while attack.is_alive():
        assert renderer.render("{{ 1 }}", {}) == "1"
        answers += attack.is_alive()
    assert answers, "no rendering began and ended during the attack"


def outcome(renderer: TemplateRenderer, source: str, variables: dict[str, Any] = VARIABLES) -> str:
    try:
        return renderer.render(source, variables)
    except (RequestError, Overloaded) as error:
        return str(error)


def test_a_template_that_exceeds_limits_again_is_refused_at_once(renderer: TemplateRenderer) -> None:
    source = "{% if messages[0].content != 'harmless' %}{{ 3 ** 99999999 }}{% endif %}"
    for _ in range(2):
        assert "processor time" in outcome(renderer, source)
    before = pids(renderer)
    assert "refused for 60 s" in outcome(renderer, source)
    assert pids(renderer) == before, "no process was asked"
    assert outcome(renderer, "{{ 2 }}") == "2"


def test_long_messages_do_not_bring_a_template_into_disrepute(renderer: TemplateRenderer) -> None:
    """Otherwise a client could block the server's template with a conversation that takes too long."""
    source = "{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}{% endfor %}fine"
    for _ in range(3):
        assert "processor time" in outcome(renderer, source, {"x": list(range(10_000))})
    assert outcome(renderer, source, {"x": [1]}) == "fine"


def test_memory_is_limited_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer_module, "CPU_S", 4)
    renderer = TemplateRenderer()
    said = outcome(renderer, "{% set x = 'a' * 10 ** 9 %}{{ x | length }}")
    assert "MiB of memory" in said
    large = outcome(renderer, "{% set n = 2 * 10 ** 8 %}{% set x = 'a' * n %}{{ x | length }}")
    assert large == "200000000"
    for pid in pids(renderer):
        assert psutil.Process(pid).memory_info().rss < 100 << 20, "the process that was large has ended"
    renderer.close()


def test_a_large_parent_does_not_make_a_process_large() -> None:
    """The kernel's peak of a process begins with that of its parent, such as one with an engine or a vocabulary."""
    ballast = bytearray(os.urandom(1)) * (300 << 20)
    renderer = TemplateRenderer(processes=1)
    assert outcome(renderer, "{{ 1 }}") == "1"
    before = pids(renderer)
    assert outcome(renderer, "{{ 1 }}") == "1"
    assert pids(renderer) == before
    assert (peak_bytes() or 0) > len(ballast)
    renderer.close()


def test_a_process_that_dies_is_replaced(renderer: TemplateRenderer) -> None:
    renderer.render("{{ 1 }}", {})
    for pid in pids(renderer):
        psutil.Process(pid).kill()
    said = {outcome(renderer, "{{ 1 }}") for _ in range(3)}
    assert said <= {"1", "the chat template was stopped: its process crashed, as too deep nesting or too "
                    "much memory causes"}  # fmt: skip
    assert outcome(renderer, "{{ 1 }}") == "1"


def test_a_process_that_hangs_is_killed_at_the_deadline(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline suffices where the kernel does not limit processor time."""
    renderer.render("{{ 1 }}", {})
    monkeypatch.setattr(renderer_module, "WALL_S", 0.2)
    for pid in pids(renderer):
        psutil.Process(pid).suspend()
    assert "runs for more than 0.2 s" in outcome(renderer, "{{ 1 }}")
    monkeypatch.undo()
    for pid in pids(renderer):
        psutil.Process(pid).resume()
    for _ in range(3):
        assert outcome(renderer, "{{ 1 }}") == "1", "a machine that was stopped is not the template's fault"


def test_traits_of_a_template_that_is_no_jinja_say_so(renderer: TemplateRenderer) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="not valid Jinja"):
            renderer.traits("{{ oops(")


def test_who_waits_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer_module, "_QUEUE_S", 0.05)
    renderer = TemplateRenderer(processes=1)
    renderer.render("{{ 1 }}", {})
    attack = threading.Thread(target=lambda: outcome(renderer, "{{ 7 ** 999999999 }}"))
    attack.start()
    time.sleep(0.02)
    assert "no process became free" in outcome(renderer, "{{ 1 }}")
    renderer.close()
    attack.join()
    assert "no process became free" in outcome(renderer, "{{ 1 }}")


def test_texts_of_any_kind_pass() -> None:
    renderer = TemplateRenderer(processes=1)
    value = {"a": ["\ud800", "\x00", "👋", 2**100, -0.5, float("inf"), None, True]}
    assert renderer.render("{{ x.a | join('|') }}", {"x": value}) == "|".join(map(str, value["a"]))
    long = "wörd " * 1_000_000
    assert renderer.render("{{ x }}", {"x": long}) == long
    with pytest.raises(RequestError, match="must have at most 262144 characters, got 300000"):
        renderer.render("x" * 300_000, {})
    renderer.close()


@pytest.mark.parametrize("end", ["", "del renderer", "renderer.close()", "import os; os._exit(0)"])
def test_no_process_outlives_its_parent(end: str) -> None:
    code = (
        "from quire.frontend.templates.renderer import TemplateRenderer; import threading, time; renderer = TemplateRenderer(); "
        "renderer.render('{{ 1 }}', {}); print(*renderer.pids(), flush=True); "
        "threading.Thread(target=lambda: renderer.render('{{ 7 ** 999999999 }}', {}), daemon=True).start(); "
        f"time.sleep(0.1); {end}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    left = [psutil.Process(int(pid)) for pid in done.stdout.split() if psutil.pid_exists(int(pid))]
    assert done.stdout and not psutil.wait_procs(left, timeout=10)[1]


def test_the_helper_imports_little() -> None:
    code = (
        "import sys, quire.frontend.templates.process; "
        "spare = {'msgspec', 'tokenizers', 'numpy', 'torch', 'quire.types', 'quire.config'} & sys.modules.keys(); "
        "assert not spare, spare"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_pool_starts_processes_as_they_are_needed() -> None:
    pool = HelperPool([sys.executable, "-c", "raise SystemExit(3)"], 2, 1 << 20)
    assert pool.pids() == []
    with pytest.raises(HelperEnded) as caught:
        pool.ask(0, b"", 10, 1)
    assert (caught.value.signal, caught.value.overdue) == (0, False)
    assert len(pool.pids()) == 1, "its successor"
    pool.close()
    with pytest.raises(HelpersBusy):
        pool.ask(0, b"", 10, 1)
