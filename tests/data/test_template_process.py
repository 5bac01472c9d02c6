"""Chat templates of an untrusted directory: their resources are limited, and they render as in this process."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from plimsoll.framework.data import template_process
from plimsoll.framework.data.template_process import TemplateProcess, compile_template
from plimsoll.framework.terminal.escaping import escape_control_chars

CONTEXT = {"messages": [{"role": "user", "content": "Grüße 😀"}], "add_generation_prompt": True}
GOOD = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 7 ** (7 ** 7 ** 7) }}",
    "a pattern of filters": "{% for i in range(99999) %}{{ range(99999) | list | sort | length }}{% endfor %}",
    "a macro": "{% macro f(n) %}{% for i in range(99) %}{{ f(n) }}{% endfor %}{% endmacro %}{{ f(1) }}",
}
HUGE = {
    "a product": "{{ 'a' * 10 ** 11 }}",
    "a sum": "{% set a = namespace(x='a') %}{% for i in range(99) %}{% set a.x = a.x ~ a.x %}{% endfor %}{{ a.x }}",
    "a format": "{{ '%99999999999d' % 1 }}",
    "a method": "{{ 'a'.center(10 ** 11) }}",
    "a list": "{{ (range(99999) | list) * 999999 }}",
    "a filter": "{{ 'a' | indent(10 ** 11) | center(10 ** 11) }}",
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "SECONDS", 1.0)


def test_it_renders_as_this_process_does() -> None:
    process = TemplateProcess(GOOD)
    for _ in range(3):
        assert process.render(CONTEXT) == compile_template(GOOD).render(CONTEXT)


@pytest.mark.once("loops", "a product")
@pytest.mark.parametrize("name", [*ENDLESS, *HUGE])
def test_template_time_and_memory_are_bounded(name: str, quick: None) -> None:
    process = TemplateProcess((ENDLESS | HUGE)[name])
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"more than 1|takes more|its process exited|too (large|big|long)|recursion"):
        process.render(CONTEXT)
    assert time.monotonic() - began < 5.0


def test_each_thread_gets_its_own_result() -> None:
    process = TemplateProcess("{{ n }}{{ 'x' * 200000 }}")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: process.render({"n": n}), range(64)))
    assert [text.rstrip("x") for text in texts] == [str(n) for n in range(64)]


def test_rendering_continues_after_an_error() -> None:
    process = TemplateProcess("{% if messages | length > 1 %}{{ raise_exception('only one') }}{% endif %}ok")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^only one$"):
            process.render({**CONTEXT, "messages": [1, 2]})
        assert process.render(CONTEXT) == "ok"


def test_after_its_end_it_starts_again(quick: None) -> None:
    process = TemplateProcess("{% if messages %}{{ 'a' * n }}{% endif %}")
    with pytest.raises(ValueError, match=r"takes more than|its process exited"):
        process.render({**CONTEXT, "n": 10**11})
    assert process.render({**CONTEXT, "n": 3}) == "aaa"
    assert process._process is not None
    os.kill(process._process.pid, 9)
    with pytest.raises(ValueError, match="its process exited"):
        process.render({**CONTEXT, "n": 3})
    assert process.render({**CONTEXT, "n": 4}) == "aaaa"


def test_control_characters_are_written_out() -> None:
    assert (
        escape_control_chars("a\x1b[2J\rb\x07\x9b31m\u202edc\n\tö€😀")
        == "a\\x1b[2J\\x0db\\x07\\x9b31m\\u202edc\n\tö€😀"
    )
