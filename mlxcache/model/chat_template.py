"""Running a model's chat template: a program that comes with the model, so not to be trusted.

Jinja's sandbox bounds what a template reaches, a time limit how long it runs. But a time limit ends
only Python code, not one operation in C such as `10**(10**8)`, which also holds the interpreter. So
each operation is bounded before it begins: no value takes more than `LIMIT` characters as text, a
list with all its parts, and all values of one rendering take at most `TOTAL` bytes.
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import _PassArg

RENDER_SECONDS = 30.0  # a conversation usually takes far less
LIMIT = 1 << 24  # characters that one value may have as text; that is 4 million tokens or more
TOTAL = 2 << 30  # bytes of all values that one rendering makes, freed or not
SOURCE = 1 << 16  # characters of a template; those of model families have less than a third
_SMALL = 128
_BITS, _LARGE = 4096, "a number of more than {:,} bits"
_NUMBER = 100_000  # largest number given to an operation that `_MULTIPLYING` names

_MULTIPLYING = frozenset(
    """
    batch center expandtabs generate_lorem_ipsum indent join list ljust replace rjust round slice
    strftime_now to_bytes tojson translate urlize wordwrap zfill
    """.split()  # noqa: SIM905 - read as a list of names
)
"""Filters, methods and functions whose result may be as long as the product of what they take."""

_LISTING = ("join", "list")  # those of them that read an iterator to its end
_WIDTH = re.compile(r"%(?:\([^()]*\))?[-#0+ ]*(\d+)?(?:\.(\d+))?")
_NESTED_KEY = re.compile(r"%\([^()]*\(")
_COLLECTIONS: Any = (
    *(list, tuple, dict, set, frozenset),
    *(type({}.keys()), type({}.values()), type({}.items())),
)


class TemplateLimit(OverflowError):
    """Error raised if a template makes too large a value, or too many."""


def apply_chat_template(tokenizer: Any, messages: Sequence[Any], **kwargs: Any) -> Any:
    """Return what the method of this name of a tokenizer of mlx-lm or transformers returns.

    Raises TimeoutError after `RENDER_SECONDS`, TemplateLimit, and what the template raises.
    """
    from transformers.utils import chat_template_utils  # noqa: PLC0415 - takes seconds

    chat_template_utils.ImmutableSandboxedEnvironment = LimitedEnvironment
    return run_limited(partial(tokenizer.apply_chat_template, messages, **kwargs), RENDER_SECONDS)


class _Meter:
    def __init__(self) -> None:
        self._spent = 0
        self._known: dict[int, tuple[Any, int]] = {}

    def made(self, value: Any) -> Any:
        """Return a new value. Raises TemplateLimit if it, or the sum of all, is too large."""
        if type(value) is str and len(value) < _SMALL:
            self.spend(_SMALL)
        elif isinstance(value, str | bytes):
            require(len(value))
            self.spend(sys.getsizeof(value))
        elif isinstance(value, int):
            require(value.bit_length(), _BITS, _LARGE)
        elif isinstance(value, _COLLECTIONS):
            self.weigh(value)
        return value

    def spend(self, size: int) -> None:
        self._spent += size
        if self._spent > TOTAL:
            raise TemplateLimit(f"it has values of more than {TOTAL:,} bytes in all")

    def weigh(self, value: Any) -> int:
        """Return about how many characters a value has as text.

        A collection is kept, so that it is weighed once and its parts are not weighed again.
        """
        if type(value) is str or isinstance(value, str | bytes):
            return 2 + len(value)
        if isinstance(value, int):
            return 8 + value.bit_length() // 3
        if not isinstance(value, _COLLECTIONS):
            return 8
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        weight = 16 + sum(self.weigh(part) for part in value)
        if isinstance(value, dict):
            weight += sum(map(self.weigh, value.values()))
        self.keep(value, weight)
        return weight

    def keep(self, value: Any, weight: int) -> Any:
        require(weight)
        self.spend(64 + 8 * len(value))
        self._known[id(value)] = value, weight
        return value

    def listed(self, value: Any) -> Any:
        if not isinstance(value, Iterator):
            return value
        size, items = 0, []
        for item in value:
            size += self.weigh(item)
            require(size)
            items.append(item)
        return items

    def weigh_all(self, values: Iterable[Any]) -> None:
        require(sum(map(self.weigh, values)))

    def multiply(self, name: str, value: Any, args: Sequence[Any]) -> None:
        """Check that the operation `name` could not make far more of `value` than allowed."""
        factor = 1
        for one in args[1:2] if name == "replace" else args:
            if isinstance(one, int):
                require(abs(one), _NUMBER, f"{name!r} with a number above {{:,}}")
            factor += abs(one) if isinstance(one, int) else self.weigh(one)
        require((1 + self.weigh(value)) * factor // 8)

    def fill(self, text: str | bytes, values: Any) -> None:
        """Check that `text % values` could not be far larger than allowed."""
        shown = text if isinstance(text, str) else text.decode("latin-1")
        if _NESTED_KEY.search(shown):
            raise TemplateLimit("it has a format with parentheses in a key")
        widths = [int(n) for found in _WIDTH.finditer(shown) for n in found.groups() if n]
        given = values if isinstance(values, tuple) else (values,)
        widths += [abs(n) for n in given if isinstance(n, int)] if "*" in shown else []
        require((sum(widths) + shown.count("%") * self.weigh(values)) // 8)


def require(
    size: int, most: int = LIMIT, what: str = "a value of more than {:,} characters"
) -> None:
    if size > most:
        raise TemplateLimit(f"it has {what.format(most)}")


class _Pieces(list[str]):
    def __init__(self, meter: _Meter):
        self._size, self._meter = 0, meter

    def append(self, piece: str) -> None:
        self._size += 1 + len(piece)
        if self._size > LIMIT:
            require(self._size)
        super().append(piece)

    def extend(self, pieces: Iterable[str]) -> None:
        for piece in pieces:
            self.append(piece)

    def joined(self) -> str:
        return str(self._meter.made("".join(self)))


class _Context(Context):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.meter = _Meter()

    def derived(self, locals: dict[str, Any] | None = None) -> _Context:
        made: _Context = super().derived(locals)  # type: ignore[assignment]
        made.meter = self.meter
        return made

    def pieces(self) -> _Pieces:
        return _Pieces(self.meter)

    def join(self, parts: tuple[Any, ...]) -> Any:
        """Return the value of `a ~ b ~ c`, which no hook of the sandbox intercepts."""
        self.meter.weigh_all(parts)
        return self.meter.made((markup_join if self.eval_ctx.autoescape else str_join)(parts))


class _Code(CodeGenerator):
    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._measure(super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._measure(super().visit_Tuple, node, frame)
        else:  # the names that `set` or `for` gives values
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._measure(super().visit_Dict, node, frame)

    def _measure(self, visit: Callable[[Any, Frame], None], node: Any, frame: Frame) -> None:
        self.write("context.meter.made(")
        visit(node, frame)
        self.write(")")

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("context.join((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def buffer(self, frame: Frame) -> None:
        super().buffer(frame)
        self.writeline(f"{frame.buffer} = context.pieces()")


class _Filters(dict[str, Callable[..., Any]]):
    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _limited(name, function))


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter with limits. As it takes the context, Jinja does not fold constants."""
    takes, multiplies = _PassArg.from_obj(function), name in _MULTIPLYING

    @pass_context
    def apply(context: _Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = context.meter
        if name == "format":
            meter.fill(str(value), kwargs or args)
        elif multiplies:
            value = meter.listed(value) if name in _LISTING else value
            meter.multiply(name, value, (*args, *kwargs.values()))
        if takes is _PassArg.context:
            args = (value, *args)
            value = context
        elif takes is not None:
            args = (value, *args)
            value = context.eval_ctx if takes is _PassArg.eval_context else context.environment
        return meter.made(function(value, *args, **kwargs))

    return apply


@pass_context
def _sum(context: _Context, values: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """Jinja's filter, which adds in C, where sums of lists take quadratic time."""
    read = make_attrgetter(context.environment, attribute) if attribute is not None else None
    for value in values:
        part = value if read is None else read(value)
        start = context.environment.call_binop(context, "+", start, part)  # type: ignore[attr-defined]
    return start


class _Fields(SandboxedFormatter):
    _size = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        for number in re.findall(r"\d+", format_spec):
            require(int(number), _NUMBER, "a width above {:,}")
        text: str = super().format_field(value, format_spec)
        self._size += len(text)
        require(self._size)
        return text


class _EscapedFields(_Fields, SandboxedEscapeFormatter):
    pass


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = _Code
    context_class = _Context

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        filters, self.filters = self.filters, _Filters()
        for name, function in {**filters, "sum": _sum}.items():
            self.filters[name] = function

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        require(len(source), SOURCE, "a source of more than {:,} characters")
        return super()._parse(source, name, filename)

    def make_globals(self, d: Any) -> Any:
        found = super().make_globals(d)
        # A namespace is not weighed, as its parts change; so it does not show them.
        hidden = {"__repr__": object.__repr__}
        found["namespace"] = type("namespace", (found["namespace"],), hidden)
        return found

    def concat(self, parts: Iterable[str]) -> str:
        if isinstance(parts, _Pieces):
            return parts.joined()
        pieces = _Pieces(_Meter())
        pieces.extend(parts)
        return pieces.joined()

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter: _Meter = context.meter  # type: ignore[attr-defined]
        if type(left) is str and operator == "+":
            return meter.made(left + right)
        if operator == "+" and isinstance(left, list | tuple):
            weight = meter.weigh(left) + meter.weigh(right)
            return meter.keep(left + right, weight)
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, list | tuple) and isinstance(times, int):
                    weight = meter.weigh(value) * max(times, 1)
                    require(weight)
                    return meter.keep(left * right, weight)
                if isinstance(value, str | bytes) and isinstance(times, int):
                    require(len(value) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            require(left.bit_length() * right, _BITS, _LARGE)
        elif operator == "%" and isinstance(left, str | bytes):
            meter.fill(left, right)
        return meter.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter: _Meter = __context.meter
        name = getattr(__obj, "__name__", None)
        if name in _MULTIPLYING:
            args = tuple(map(meter.listed, args)) if name in _LISTING else args
        given = [*args, *(kwargs[key] for key in kwargs if key not in _VARIABLES)]
        if name in _MULTIPLYING:
            meter.multiply(name, getattr(__obj, "__self__", " " * 65_536), given)
        elif given:
            meter.weigh_all(given)
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__

        def format_text(*args: Any, **kwargs: Any) -> str:
            fields = (
                _EscapedFields(self, escape=text.escape)
                if hasattr(text, "__html__")
                else _Fields(self)
            )
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            kind: type[str] = type(text)
            return kind(fields.vformat(text, args, kwargs))

        return format_text


_VARIABLES = ("_loop_vars", "_block_vars")
"""Arguments that the code of a loop or block passes with each call, and Jinja takes out again."""


# -- time limit ------------------------------------------------------------------------------------

T = TypeVar("T")


class _Overdue(BaseException):
    """Raised in a thread whose time limit has passed; no `except Exception` catches it."""


class _Watch:
    """A thread that raises `_Overdue` in threads whose time limit has passed.

    A thread cannot be killed, but Python can raise an exception in it:
    https://docs.python.org/3/c-api/threads.html#c.PyThreadState_SetAsyncExc.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._due: dict[object, tuple[float, int]] = {}
        self._wakes = math.inf
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> object:
        handle, deadline = object(), time.monotonic() + seconds
        with self._lock:
            self._due[handle] = deadline, threading.get_ident()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="mlxcache-time-limit", daemon=True
                )
                self._thread.start()
            elif deadline < self._wakes:
                self._changed.notify()
        return handle

    def end(self, handle: object) -> None:
        """Cancel a time limit. `_Overdue` may still be raised during this call, not after it."""
        with self._lock:
            self._due.pop(handle, None)

    def _run(self) -> None:
        with self._lock:
            while True:
                now = time.monotonic()
                for handle, (deadline, thread) in list(self._due.items()):
                    if deadline <= now:
                        del self._due[handle]
                        _interrupt(thread)
                self._wakes = min((due for due, _ in self._due.values()), default=math.inf)
                self._changed.wait(None if self._wakes == math.inf else self._wakes - now)


def _interrupt(thread: int) -> None:
    overdue = ctypes.py_object(_Overdue)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), overdue)


_watch = _Watch()


def run_limited(work: Callable[[], T], seconds: float) -> T:
    """Run `work` and return its result. Raises TimeoutError if it takes longer than `seconds`.

    Only Python code is interrupted: a call into C, such as a long regular expression, ends first.
    """
    try:
        handle = _watch.begin(seconds)
        try:
            return work()
        finally:
            _watch.end(handle)
    except _Overdue:
        raise TimeoutError(f"not done after {seconds:g} s") from None
