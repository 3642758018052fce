"""A chat template is a program that comes with a model: it is sandboxed and limited in time."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxcache.errors import BadRequest, ContextLengthExceeded, GenerationFailed
from mlxcache.model import chat_template
from mlxcache.model.chat_template import run_limited
from mlxcache.prompt import template as module
from mlxcache.prompt.template import Template
from tests.prompt import kinds, templates
from tests.prompt.families import FAMILIES

USER = {"role": "user", "content": "hi"}
MESSAGES = [USER, {"role": "assistant", "content": "yes"}]
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__()[0] }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__globals__['os'].system('touch CANARY') }}",
    "{{ cycler.__init__.__globals__.os.popen('touch CANARY').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ messages|map(attribute='__class__')|list|first }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '%s' % messages.append.__self__.__class__.__subclasses__ }}",
    "{% set x = messages.append('more') %}{{ messages|length }}",
    "{% set x = messages[0].update({'content': 'forged'}) %}{{ messages[0].content }}",
    "{% set x = messages.clear() %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{% for i in range(1000000000) %}{% endfor %}",
]
"""Ways out of a template that are known; a sandbox gives nothing for them, or an error."""

TELLTALE = ("class '", "<class", "<built-in", "function", "module", "root:", "environ", "forged")


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_reaches_nothing_but_the_conversation(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither Python's internals, nor files, nor commands; nor does it change what it is given."""
    monkeypatch.chdir(tmp_path)
    template = Template(kinds.tokenizer("byte_level", "BEGIN" + source + "END"))
    given = [dict(message) for message in MESSAGES]
    try:
        text = template.render(given, generation=True, args={})
    except (GenerationFailed, BadRequest):
        text = ""
    assert not [word for word in TELLTALE if word in text], text
    assert given == MESSAGES
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools", "tokenize"])
def test_no_request_brings_a_template_of_its_own(name: str) -> None:
    assert name in module.RESERVED


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("of", [ENDLESS, "{% macro m() %}" + ENDLESS + "{% endmacro %}{{ m() }}"])
def test_one_that_does_not_end_is_ended(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread is free again, for others' conversations."""
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.2)
    template = Template(kinds.tokenizer("byte_level", of))
    for _ in range(2):
        with pytest.raises(GenerationFailed, match="took too long"):
            template.render(MESSAGES, generation=True, args={})
    time.sleep(0.3)  # nothing comes late


COMPILED = [
    "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "9" * 5000 + " }}",
    "{{ x }}" * 99_999,
]


@pytest.mark.parametrize("source", COMPILED)
def test_one_that_cannot_be_compiled_is_an_error_like_any_other(source: str) -> None:
    template = Template(kinds.tokenizer("byte_level", source))
    with pytest.raises((GenerationFailed, BadRequest)):
        template.render(MESSAGES, generation=True, args={})


def test_a_conversation_beyond_every_context_is_the_client_s_error() -> None:
    template = Template(kinds.tokenizer("byte_level", templates.QWEN3))
    text = "x" * (chat_template.LIMIT + 1)
    with pytest.raises(ContextLengthExceeded, match="prompt is too long"):
        template.render([{"role": "user", "content": text}], generation=True, args={})


LANGUAGE = [
    "{{ 'a' ~ 1 ~ none ~ [1, 'b'] ~ x }}|{{ ('<' | e) ~ '<' }}|{{ 2 ** 10 + 7 * 6 % 5 - 1.5 }}",
    "{{ '%s-%03d %(a)s%%' | replace('%(a)s', '') % ('x', 7) }}{{ '%(a)s' % {'a': 1} }}",
    "{{ '{0:>5}|{a[k]!r}|{0:{w}}'.format(7, a={'k': 'v'}, w=3) }}{{ ('<{}>' | safe).format('<') }}",
    "{{ '{a}'.format_map({'a': 1}) }}{{ '%5.2f' | format(3.14159) }}{{ ', '.join(names) }}",
    "{{ names | map('upper') | join('-') }}{{ names | select('in', ['ab']) | list }}",
    "{{ items | sum(attribute='n') }}{{ [[1], [2]] | sum(start=[]) }}{{ [1, 2] * 2 + [3] }}",
    "{{ items | groupby('n') | list }}{{ items | tojson(indent=2) }}{{ (1, 2) + (3,) }}",
    "{% macro m(a, b='c') %}[{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller and caller() }}]"
    "{% endmacro %}{{ m(1) }}{{ m(1, 2, 3, k=4) }}{% call m(1) %}inner{% endcall %}",
    "{% set n = namespace(t='', l=[]) %}{% for i in items %}{% set n.t = n.t ~ i.n ~ loop.index %}"
    "{% set n.l = n.l + [i] %}{% endfor %}{{ n.t }}{{ n.l }}{{ n.l | length }}",
    "{% for a, b in {'k': (1, 2)}.items() %}{{ a }}{{ b }}{% endfor %}{% set x, y = 1, [2] %}",
    "{% set t %}a{{ names[0] }}{% endset %}{% filter upper %}{{ t }}b{% endfilter %}{{ t | list }}",
    "{% for n in tree recursive %}{{ n.name }}{{ loop(n.below) }}{% endfor %}{{ x is defined }}",
    "{% block a scoped %}{{ names | first }}{% endblock %}{{ self.a() }}{{ names[::-1] }}",
    "{{ 'a b' | title | wordwrap(2) | indent(2, true) }}{{ 'ab' | list }}{{ 'x'.ljust(4) }}",
    "{{ names | default('x') }}{{ zz | default([1, {'a': names}]) }}{{ dict(a=names, b=2) }}",
]


@pytest.mark.parametrize("source", [*LANGUAGE, *(one.template for one in FAMILIES.values())])
def test_the_limits_change_nothing_that_a_template_writes(source: str) -> None:
    values = {
        "names": ["ab", "c"],
        "items": [{"n": 1}, {"n": 2}, {"n": 1}],
        "tree": [{"name": "a", "below": [{"name": "b", "below": []}]}],
        "messages": [{"role": "system", "content": " be kind "}, *MESSAGES, USER],
        "raise_exception": str,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, None]}}}],
        "add_generation_prompt": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    shown = []
    for kind in (ImmutableSandboxedEnvironment, chat_template.LimitedEnvironment):
        environment = kind(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        shown.append(environment.from_string(source).render(values))
    assert shown[0] == shown[1]


class TestBounded:
    def test_leaves_no_exception_behind_and_takes_one_thread_for_all(self) -> None:
        """Also where the work ends just when its time does."""
        run_limited(int, 10)
        before = threading.active_count()
        ended = late = 0
        for _ in range(60):
            try:
                run_limited(lambda: time.sleep(0.003), 0.003)
                ended += 1
            except TimeoutError:
                late += 1
            for _ in range(100):
                pass
        assert ended + late == 60
        assert threading.active_count() <= before

    def test_each_thread_has_its_own_time(self) -> None:
        """A shorter one that begins later is due first, and only its own thread is told."""
        told: list[str] = []

        def work(name: str, seconds: float, asleep: float) -> None:
            def sleeping() -> None:
                end = time.monotonic() + asleep
                while time.monotonic() < end:
                    time.sleep(0.005)

            try:
                run_limited(sleeping, seconds)
                told.append(f"{name} ended")
            except TimeoutError:
                told.append(f"{name} late")

        threads = [
            threading.Thread(target=work, args=("patient", 60.0, 0.5)),
            threading.Thread(target=work, args=("hasty", 0.1, 60.0)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert sorted(told) == ["hasty late", "patient ended"]
