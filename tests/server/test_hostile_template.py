"""A chat template comes with a model, and may be written to stop the server that runs it."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from tests.conftest import ToyMaker
from tests.forked import served
from tests.server.api import CHAT, Api, user

DOUBLING = (
    "{% set n = namespace(a=START) %}{% for i in range(60) %}{% set n.a = STEP %}{% endfor %}"
)


def doubling(start: str, step: str) -> str:
    return DOUBLING.replace("START", start).replace("STEP", step)


HOSTILE = [
    "{{ 10**(10**8) }}",
    doubling("2", "n.a * n.a"),
    "{{ 'x' * 10**10 }}",
    "{{ ([0] * 10**10) | length }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.*f' % (10**9, 1.0) }}",
    "{{ '%((a))999999999s' % {'(a)': 1} }}",
    "{{ '%s%s' | format('x' * 9999999, 'y' * 9999999) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10**9) }}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x\\ny' | indent(10**9) }}",
    "{{ range(10**10) | list }}",
    "{{ range(10**5) | map(attribute='x', default='x' * 10**7) | join }}",
    "{{ range(10**5) | map('center', 10**5) | list }}",
    "{{ [1] | batch(10**9, 2) | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ ([['x'] * 1000] * 1000) | sum(start=[]) }}",
    "{{ 'x y' | wordwrap(1, wrapstring='y' * 10**7 * 9) }}",
    "{{ ('a.co ' * 10**6) | urlize(rel='z' * 10**6) }}",
    "{{ [1, [2]] | tojson(indent=10**9) }}",
    "{{ 3.7 | round(10**9) }}",
    "{{ ('f' * 10**6) | int(0, 16) }}",
    "{{ lipsum(10**9) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ '1'.zfill(10**10) }}",
    "{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}",
    "{{ ('x' * 10**6).translate({120: 'y' * 10**6}) }}",
    "{{ ('x' * 10**6).join(range(10**5) | map('string')) }}",
    "{{ ('\\t' * 10**6).expandtabs(10**9) }}",
    "{{ ('x' * 10**7).encode('utf-32') }}",
    "{{ (1).to_bytes(10**10, 'big') }}",
    "{{ raise_exception(['x' * 10**6] * 10**5) }}",
    doubling("'x'", "n.a ~ n.a"),
    doubling("'x'", "n.a | replace('x', 'xx')"),
    doubling("[1]", "[n.a, n.a]") + "{{ n.a }}",
    doubling("[1]", "{'a': n.a, 'b': n.a}") + "{{ n.a | tojson }}",
    doubling("(1,)", "(n.a, n.a)") + "{{ {n.a: 1} }}",
    doubling("[1]", "dict(a=n.a, b=n.a).values()") + "{{ n.a | string }}",
    "{% macro m(n) %}{{ varargs[2] }}{{ m(n + varargs, n, n) }}{% endmacro %}{{ m((1,), 2) }}",
    "{% macro m(s) %}{{ m(s ~ s) }}{% endmacro %}{{ m('xxxxxxxx') }}",
    "{% macro m() %}{{ 'x' * 99 }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set c = cycler('x' * 10**7, 'y') %}{% for i in range(9) %}{{ c.next() }}{% endfor %}",
    "{% set b = 'x' * 10**7 %}{% set t %}{% for i in range(99) %}{{ b }}{% endfor %}{% endset %}",
    "{% set n = namespace(a=[]) %}{% for i in range(9**5) %}"
    "{% set n.a = n.a + ['x' * 10**6] %}{% endfor %}",
    "{% set b = 'x' * 10**7 %}{% for i in range(9**5) %}{% set c = b ~ i %}{% endfor %}",
]

TOLD = ("the model's chat template failed", "nested too deeply")


def test_none_of_many_hostile_templates_stops_a_server(toy: ToyMaker, tmp_path: Path) -> None:
    """Each is a clear error, while /health answers; memory stays bounded, and SIGTERM works."""
    folder = tmp_path / "model"
    shutil.copytree(toy("llama"), folder)
    cases = "".join(
        f"{{% elif messages[-1].content == 'case {i}' %}}{source}"
        for i, source in enumerate(HOSTILE)
    )
    (folder / "chat_template.jinja").write_text(
        "{% if not messages %}{{ 10**(10**8) }}"
        + cases
        + "{% else %}{{ messages[-1].content }}{% endif %}"
    )
    with served("--model", str(folder), home=tmp_path) as running:
        api = Api(running)
        process = psutil.Process(running.process.pid)
        before, peak, done = process.memory_info().rss, [0], threading.Event()

        def watch() -> None:
            with httpx.Client(base_url=api.url, timeout=10) as client:
                while not done.wait(0.02):
                    seen.append(client.get("/health").status_code)
                    peak[0] = max(peak[0], process.memory_info().rss)

        seen: list[int] = []
        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            for i, source in enumerate(HOSTILE):
                answer = api.post(CHAT, {"messages": [user(f"case {i}")], "max_tokens": 1})
                message = answer.json()["error"]["message"]
                assert any(words in message for words in TOLD), (source, message)
            done.set()
            watching.result()
        assert set(seen) == {200}
        assert peak[0] - before < 3 << 30
        assert running.stop() == 0
