"""Play a conversation to two servers, one of which never has anything cached, and judge both."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import mlx_lm
from mlx_lm.sample_utils import make_logits_processors

from mlxcache.errors import MlxcacheError
from mlxcache.model.sampling import make_sampler, text_ends
from mlxcache.scheduling.anticipate import MIN_GAIN
from mlxcache.types import Sampling
from tests.proofs.features.apis import APIS, Chat, Entry, Json, Reply, Said
from tests.proofs.features.plan import FORMATS, MARKERS, TOOLS, Conversation, Features, Step
from tests.proofs.features.servers import Client, Host

TOKENS, WORDS = 8, 6
"""Tokens of a reply and words of a message where a step does not say."""

LOGPROB = 2e-3
"""Most by which a log-probability may differ: float32 sums differ."""

ENDING = 8
"""Most tokens at the end of a reply that a next turn feeds again."""

CLOSED = MIN_GAIN
"""Most tokens of a reply behind empty thinking, which the next prompt leaves out, that are not
computed in advance."""

OPENING = 16
"""Most tokens of a template that follow the last message, and are fed again in each turn."""

UNREAD = 128 + 64
"""Tokens that may be missing in RAM without the disk being read, and those of a block."""


FAULTS = (AssertionError, LookupError, ValueError, OSError, httpx.HTTPError, MlxcacheError)
"""Errors of a conversation whose servers are not as they should be."""

OWN = {"tokens", "words", "odd", "stop", "temperature", "top_p", "top_k", "min_p", "xtc", "bias"}
OWN |= {
    "repetition",
    "ids",
    "echo",
    "stream",
    "restart",
    "beside",
    "thin",
    "logprobs",
    "previous",
    "cancel",
}
"""Features that mlx-lm has too, or that change no token. Its presence and frequency penalties count
the prompt as well."""


class MlxLm:
    def __init__(self, path: Path):
        self._model, self.tokenizer = mlx_lm.load(str(path))[:2]
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        self.vocab_size = int(config.get("text_config", config)["vocab_size"])

    def can(self, features: Features) -> bool:
        """Return whether mlx-lm has these features. It adds biases before the penalty."""
        return features.keys() <= OWN and not {"bias", "repetition"} <= features.keys()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    def complete(self, ids: Sequence[int], wishes: Features, *, blank: bool) -> str:
        """Return the reply to a prompt, alone and without reuse; the draws are the server's.

        `blank`: begin with the blank of the first token, which mlx-lm leaves out.
        """
        temperature, seed = wishes.get("temperature", (0.0, None))
        chance, threshold = wishes.get("xtc", (0.0, 0.1))
        sampling = Sampling(
            temperature=temperature, seed=seed, xtc_probability=chance, xtc_threshold=threshold,
            **{name: wishes[name] for name in ("top_p", "top_k", "min_p") if name in wishes},
        )  # fmt: skip
        penalty, context = wishes.get("repetition", (None, 20))
        parts = list(mlx_lm.stream_generate(
            self._model, self.tokenizer, list(ids),
            max_tokens=wishes["tokens"],
            sampler=make_sampler(sampling, self.vocab_size, text_ends(self.tokenizer)),
            logits_processors=make_logits_processors(
                dict(wishes.get("bias", ())) or None, penalty, context
            ),
        ))  # fmt: skip
        first = self.tokenizer.convert_ids_to_tokens(parts[0].token)
        lost = " " if blank and first.startswith("\u0120") else ""
        return lost + "".join(part.text for part in parts)


class Difference(AssertionError):
    """A reply, a count or a server is not as it should be."""


@dataclass(slots=True)
class Counts:
    """What was played. `tokens`: of all prompts and replies."""

    conversations: int = 0
    requests: int = 0
    tokens: int = 0
    features: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt that the server computed. `life`: how often it had been restarted by then.

    `reply`: what was said to it, if the next prompt has the `kept` tokens of it as they were drawn.
    """

    talk: tuple[Entry, ...]
    key: tuple[Any, ...]
    prompt: int
    life: int
    reply: Entry | None = None
    kept: int = 0


class Pair:
    """Two servers of one model, and mlx-lm. `thinks`: its template opens thinking.

    `roomy`: the server that caches has memory for all, so that nothing may be lost.
    """

    def __init__(
        self, name: str, path: Path, warm: Host, cold: Host, *, thinks: bool, roomy: bool = True
    ):
        self.name, self.thinks, self.roomy = name, thinks, roomy
        self.warm, self.cold = Client(warm), Client(cold)
        self.mlx_lm = MlxLm(path)
        self.counts = Counts()

    def close(self) -> None:
        for client in (self.warm, self.cold):
            client.close()
            client.host.close()


def play(conversation: Conversation, pair: Pair) -> None:
    """Play a conversation. Raises Difference, or an error of a server that does not answer."""
    Play(conversation, pair).run()
    pair.counts.conversations += 1


class Play:
    """One conversation on its way. `branches`: its talks, each a list of entries.

    `free`: what the reference alone said, without stop strings, and remembers.
    """

    def __init__(self, conversation: Conversation, pair: Pair):
        self.conversation, self.pair = conversation, pair
        self.api = APIS[conversation.api]
        self.branches: list[list[Entry]] = [[]]
        self.known: list[Known] = []
        self.said: dict[int, Said] = {}
        self.responses: dict[int, str] = {}
        self.free: list[Said] = []
        self.restarts = 0
        self._spoken = 0
        rng = random.Random(f"system {conversation.seed}")
        self.system = self._words(rng, conversation.system) if conversation.system else ""

    def run(self) -> None:
        for number, step in enumerate(self.conversation.steps):
            try:
                self._step(step)
            except FAULTS as error:
                raise Difference(f"step {number}, {step}: {error!r}") from error
        self._rest()

    def _rest(self) -> None:
        warm = self.pair.warm
        try:
            warm.host.settle()
            warm.host.check()
            for client in (warm, self.pair.cold):
                assert client.get("/health")["status"] == "ok"
        except FAULTS as error:
            raise Difference(f"at rest: {error!r}") from error

    # -- what is asked -----------------------------------------------------------------------------

    def _words(self, rng: random.Random, count: int) -> str:
        return f"{self.conversation.seed}: " + " ".join(
            rng.choice(("one", "file", "and", "12", "Paris", "def", "x = 1;", "naïve", "the"))
            for _ in range(count)
        )

    def _message(self, features: Features) -> Entry:
        self._spoken += 1
        rng = random.Random(f"message {self.conversation.seed} {self._spoken}")
        text = self._words(rng, features.get("words", WORDS)) + features.get("odd", "")
        return self.api.user(text)

    def _talk(self, step: Step) -> list[Entry]:
        """Return the talk of a step, which ends with what is to be replied to."""
        at = min(len(self.branches) - 1, int(step.place * len(self.branches)))
        talk = list(self.branches[at])
        if step.move == "edit" and (users := [i for i, e in enumerate(talk) if e.kind == "user"]):
            talk = talk[: users[int(step.place * len(users))]]
        if step.move == "again" and talk and talk[-1].kind == "reply":
            talk.pop()
        if not talk or talk[-1].kind == "reply":
            said = self.said.get(id(talk[-1])) if talk else None
            if said is not None and said.calls and self.conversation.tools:
                talk.append(self.api.results(said, f"Done {self._spoken}."))
            else:
                talk.append(self._message(step.features))
        if "continued" in step.features and talk[-1].kind != "begun":
            talk.append(self.api.begun(step.features["continued"]))
        self._branch = at if step.move != "fork" else len(self.branches)
        return talk

    def _wishes(self, step: Step) -> dict[str, Any]:
        """Return the features of a step with tokens as ids; stop strings are still drawn."""
        wishes = {"tokens": TOKENS} | dict(step.features)
        if self.conversation.tools:
            wishes = {"call": "auto"} | wishes
        mlx_lm = self.pair.mlx_lm
        wishes["encode"] = mlx_lm.encode
        if "bias" in wishes:
            vocab = mlx_lm.tokenizer.get_vocab()
            named = {
                vocab[token] if isinstance(token, str) else int(token * mlx_lm.vocab_size): value
                for token, value in wishes["bias"]
                if not isinstance(token, str) or token in vocab
            }
            wishes["bias"] = list(named.items())
        return wishes

    def _body(self, talk: Sequence[Entry], wishes: Features) -> Json:
        return self.api.body(talk, self.system, wishes)

    # -- one request -------------------------------------------------------------------------------

    def _step(self, step: Step) -> None:
        features, pair = step.features, self.pair
        if "restart" in features:
            pair.warm.host.settle()
            pair.warm.host.restart()
            self.restarts += 1
        talk, wishes = self._talk(step), self._wishes(step)
        free = None
        if "stop" in features:
            free = self._cold(self._body(talk, {k: v for k, v in wishes.items() if k != "stop"}))
            self.free += free.choices
            wishes["stop"] = [
                text for drawn in features["stop"] if (text := _stop_of(drawn, free.choices, step))
            ]
        body = self._body(talk, wishes)
        beside = self._beside(features["beside"]) if "beside" in features else None
        if beside is not None:
            beside.start()
        pair.warm.host.settle()
        with self._thinning(features):
            if "cancel" in features:
                cold, warm = self._cancel(body, wishes)
            else:
                cold = self._cold(body)
                sent = self._continuing(talk, body) if "previous" in features else body
                warm = pair.warm.ask(self.api, sent, stream="stream" in features)
        if beside is not None:
            beside.join()
            assert beside.found == [], beside.found
        if "echo" in features:
            self._drop_echo(talk, warm, cold, *([free] if free is not None else []))
        self._count(step, warm)
        if warm.status != 200 or cold.status != 200:
            both = (warm.status, _message(warm)), (cold.status, _message(cold))
            assert both[0] == both[1], both
            assert warm.status == 400, warm.error
            return
        self._compare(warm, cold, wishes, free)
        self._judge(talk, wishes, warm, cold)
        self._go_on(step, talk, warm)
        if "thin" in features:
            self.known.clear()

    def _drop_echo(self, talk: Sequence[Entry], *replies: Reply) -> None:
        """Take the prompt's text from the choices."""
        prompt = self._text(talk)
        for said in [said for reply in replies for said in reply.choices]:
            assert said.text.startswith(prompt) or not said.text, (said.text, prompt)
            said.text = said.text.removeprefix(prompt)

    def _text(self, talk: Sequence[Entry]) -> str:
        return "".join([self.system, *(item for entry in talk for item in entry.items)])

    def _cold(self, body: Json) -> Reply:
        self.pair.cold.forget()
        reply = self.pair.cold.ask(self.api, body)
        assert reply.cached == 0, f"the reference has {reply.cached} tokens cached"
        return reply

    def _cancel(self, body: Json, wishes: Features) -> tuple[Reply, Reply]:
        """Leave a stream after some events; the reference replies up to the same token."""
        events, _ = wishes["cancel"]
        warm = self.pair.warm.ask(self.api, body, leave_after=events)
        if warm.status != 200:
            return self._cold(body), warm
        assert not warm.error, warm.error
        (record,) = self.pair.warm.records(warm.id, 1)
        assert record["status"] in ("done", "cancelled"), record
        if record["status"] == "done" or not record["generated_tokens"]:
            return self._cold(body), warm
        names = ("max_tokens", "max_output_tokens")
        cut = {name: record["generated_tokens"] for name in names if name in body}
        return self._cold(body | cut), warm

    def _continuing(self, talk: Sequence[Entry], body: Json) -> Json:
        """Return a body of /v1/responses that continues the stored response before its end."""
        for at in reversed(range(len(talk))):
            stored = self.responses.get(id(talk[at]))
            if stored is not None and self.conversation.thoughts:
                new = [item for entry in talk[at + 1 :] for item in entry.items]
                return body | {"input": new, "previous_response_id": stored}
        return body

    @contextmanager
    def _thinning(self, features: Features) -> Iterator[None]:
        """Drop KV of the server now, and if drawn while requests run, too."""
        during, number = features.get("thin", (False, None))
        if number is None:
            yield
            return
        self.known.clear()
        host, over = self.pair.warm.host, threading.Event()
        host.thin(number)

        def go_on() -> None:
            for more in range(number, number + 50 * during):
                if over.wait(0.01):
                    return
                host.thin(more)

        with ThreadPoolExecutor(1) as pool:
            thinner = pool.submit(go_on)
            try:
                yield
            finally:
                over.set()
                thinner.result()

    def _beside(self, number: int) -> Beside:
        text = self._words(random.Random(number), 5 + number)
        body = Chat().body([Chat().user(text)], "", {"tokens": 20})
        return Beside(self.pair, body)

    # -- what must hold ----------------------------------------------------------------------------

    def _compare(self, warm: Reply, cold: Reply, wishes: Features, free: Reply | None) -> None:
        assert not warm.error, warm.error
        if not warm.complete:
            for said, whole in zip(warm.choices, cold.choices, strict=False):
                assert whole.text.startswith(said.text), f"{said.text!r} of {whole.text!r}"
                assert whole.thinking.startswith(said.thinking), (said.thinking, whole.thinking)
            return
        for said, other in zip(warm.choices, cold.choices, strict=True):
            assert said.shown == other.shown, f"warm {said.shown}, cold {other.shown}"
            for (token, one, top), (_, value, likeliest) in zip(
                said.logprobs, other.logprobs, strict=True
            ):
                assert abs(one - value) < LOGPROB, f"{token!r}: warm {one}, cold {value}"
                pairs = zip(top, likeliest, strict=True)
                assert all(abs(a - b) < LOGPROB for a, b in pairs), (token, top, likeliest)
        counted = (warm.prompt, warm.generated, warm.reasoning)
        assert counted == (cold.prompt, cold.generated, cold.reasoning), (counted, cold)
        if free is not None and free.status == 200:
            self._check_stops(cold, free, wishes["stop"])

    def _check_stops(self, reply: Reply, free: Reply, stops: Sequence[str]) -> None:
        """The text is that without stop strings, up to the first of them."""
        for said, whole in zip(reply.choices, free.choices, strict=True):
            if whole.calls or said.calls or (whole.thinking and self.pair.thinks):
                continue
            ends = [(at + len(s), -len(s), s) for s in stops if (at := whole.text.find(s)) >= 0]
            if not ends:
                assert said.shown[:3] == whole.shown[:3], (stops, said.shown, whole.shown)
                continue
            end, less, found = min(ends)
            text = whole.text[: end + less]
            same = said.text == text or (self.conversation.api == "messages" and not text.strip())
            assert same, f"{stops}: {said.text!r}, not {text!r} of {whole.text!r}"
            if self.conversation.api != "responses":
                assert said.stop == found, (said.stop, found)
                reason = "stop_sequence" if self.conversation.api == "messages" else "stop"
                assert said.finish == reason, (said, whole)
        assert reply.generated <= free.generated, (stops, reply, free)

    def _judge(self, talk: list[Entry], wishes: Features, warm: Reply, cold: Reply) -> None:
        """Check the counts, what was reused, the format, each seed, and mlx-lm's own reply."""
        choices = wishes.get("n", 1)
        records = self.pair.warm.records(warm.id, choices)
        for record in records:
            done = record["cached_tokens"] + record["fed_tokens"] == record["prompt_tokens"]
            assert done or record["status"] == "cancelled", record
            assert record["restored_tokens"] <= record["cached_tokens"], record
        if warm.complete:
            assert warm.prompt == records[0]["prompt_tokens"], (warm, records)
            assert warm.cached == min(one["cached_tokens"] for one in records), (warm, records)
            assert warm.generated == sum(one["generated_tokens"] for one in records), records
            self._check_format(warm, wishes)
            self._check_warm(talk, wishes, records[0])
        if choices > 1 and "temperature" in wishes:
            temperature, seed = wishes["temperature"]
            last = {k: v for k, v in wishes.items() if k != "n"}
            last["temperature"] = (temperature, (seed + choices - 1) % 2**63)
            reply = self._cold(self._body(talk, last))
            if "echo" in wishes:
                self._drop_echo(talk, reply)
            (alone,) = reply.choices
            assert alone.shown == cold.choices[-1].shown, (alone.shown, cold.choices[-1].shown)
        features = wishes.keys() - {"encode"}
        if warm.complete and self.pair.mlx_lm.can(dict.fromkeys(features)):
            self._check_mlx_lm(talk, wishes, warm)

    def _check_warm(self, talk: list[Entry], wishes: Features, record: Json) -> None:
        cached, prompt = record["cached_tokens"], record["prompt_tokens"]
        if _scores_prompt(wishes):
            assert cached == 0, record
            return
        for known in self.known:
            length = len(known.talk)
            if list(known.talk) != talk[:length] or known.key != self._key(wishes):
                continue
            least = min(known.prompt, prompt) - OPENING
            if known.reply is not None and length < len(talk) and talk[length] is known.reply:
                least = known.prompt + known.kept - ENDING
                least -= CLOSED if wishes.get("think") == "off" else 0
            least -= 0 if known.life == self.restarts else UNREAD
            assert cached >= least or not self.pair.roomy, (
                f"{cached} of {prompt} cached, not {least}; {known}"
            )
        self.pair.counts.events["warm"] += cached > OPENING

    def _key(self, wishes: Features) -> tuple[Any, ...]:
        """What changes the beginning of a prompt."""
        return "call" in wishes, wishes.get("think") if self.pair.thinks else None, "ids" in wishes

    def _check_format(self, reply: Reply, wishes: Features) -> None:
        schemas = {tool["name"]: tool["parameters"] for tool in TOOLS}
        for said in reply.choices:
            for _, name, arguments in said.calls:
                if wishes.get("call") in ("required", "named", "one"):
                    jsonschema.validate(json.loads(arguments), schemas[name])
                    assert name == "paint" or wishes["call"] != "named"
            ended = said.finish in ("stop", "end_turn") and not said.stop
            ended = ended or (said.finish == "completed" and "stop" not in wishes)
            called = self.conversation.tools and said.text.lstrip().startswith("<tool_call>")
            if "format" in wishes and ended and not (said.calls or called or "bias" in wishes):
                form = FORMATS[wishes["format"]]
                if "schema" in form:
                    jsonschema.validate(json.loads(said.text), form["schema"])
                elif "object" in form:
                    assert isinstance(json.loads(said.text), dict)
                elif "choice" in form:
                    assert said.text in form["choice"], said.text

    def _check_mlx_lm(self, talk: list[Entry], wishes: Features, reply: Reply) -> None:
        mlx_lm, api = self.pair.mlx_lm, self.conversation.api
        if api == "completions":
            ids = mlx_lm.encode(self._text(talk)) if "ids" in wishes else None
        elif len(talk) > 1 or self.pair.thinks:
            return  # replies are sent back as they were drawn, which the template does not know
        else:
            content = talk[0].items[0]["content"]
            if any(marker in content for marker in MARKERS):
                return  # for the template it is a control token
            roles = [{"role": "system", "content": self.system}] if self.system else []
            ids = mlx_lm.prompt([*roles, {"role": "user", "content": content}])
        if ids is None or not ids:
            return
        assert len(ids) == reply.prompt, (len(ids), reply.prompt)
        said = reply.choices[0]
        text = mlx_lm.complete(ids, wishes, blank=api == "completions")
        stops = [
            (at + len(s), -len(s)) for s in wishes.get("stop", ()) if (at := text.find(s)) >= 0
        ]
        if stops:
            text = text[: sum(min(stops))]
        if said.stop == "repetition":
            assert text.startswith(said.text), (said.text, text)
        else:
            blank = api == "messages" and not text.strip()
            assert said.text == text or blank, f"{said.text!r}, mlx-lm {text!r}"
        self.pair.counts.events["mlx-lm"] += 1

    # -- how it goes on ----------------------------------------------------------------------------

    def _go_on(self, step: Step, talk: list[Entry], warm: Reply) -> None:
        """Add the reply to its branch, as a client does; a reply that was left may be dropped."""
        said = self._kept(step, warm)
        branch = list(talk)
        known = Known(tuple(talk), self._key(self._wishes(step)), warm.prompt, self.restarts)
        if said is not None:
            begun = branch.pop().text if branch[-1].kind == "begun" else ""
            entry = self.api.answer(said, begun, thoughts=self.conversation.thoughts)
            branch.append(entry)
            self.said[id(entry)] = said
            if warm.response_id:
                self.responses[id(entry)] = warm.response_id
            changed = any((said.stop, said.thinking, said.calls, begun, warm.choices[1:]))
            marked = any(marker in said.text for marker in MARKERS)
            if self.conversation.api == "chat" and not changed and not marked:
                known = replace(known, reply=entry, kept=warm.generated)
        told = talk[-1].kind == "user" or not self.pair.thinks
        if warm.complete and told and not _scores_prompt(step.features):
            # else the template drops thoughts from what it rendered as soon as a user goes on
            self.known.append(known)
        if self._branch == len(self.branches):
            self.branches.append(branch)
        else:
            self.branches[self._branch] = branch

    def _kept(self, step: Step, warm: Reply) -> Said | None:
        """Return the choice that the client goes on with, or None."""
        keeps = warm.complete or ("cancel" in step.features and step.features["cancel"][1])
        if not (keeps and warm.pieces):
            return None
        said = warm.choices[int(step.place * len(warm.choices))]
        others = [one for one in warm.choices if one is not said]
        others += [one for one in self.free if one.shown != said.shown]
        if any(one.content == said.content for one in others):
            return None  # maybe of other tokens: which of them is sent back could not be told
        if not warm.complete:
            said.items, said.calls = (), []
        return said

    def _count(self, step: Step, warm: Reply) -> None:
        counts = self.pair.counts
        counts.features.update(step.features.keys())
        counts.features[step.move] += 1
        counts.features[self.conversation.api] += 1
        counts.events[f"status {warm.status}"] += 1
        counts.requests += 1
        counts.tokens += warm.prompt + warm.generated
        for said in warm.choices:
            if said.finish is not None:
                counts.events[f"end {said.finish}"] += 1
            counts.events["stop found"] += said.stop is not None
            counts.events["calls"] += len(said.calls)
            counts.events["thinking"] += bool(said.thinking)
        counts.events["left"] += warm.status == 200 and not warm.complete


def _scores_prompt(features: Features) -> bool:
    """Return whether the prompt's log-probabilities are asked for: it is fed, and not kept."""
    return {"echo", "logprobs"} <= features.keys()


class Beside(threading.Thread):
    """A request that is computed together with another one."""

    def __init__(self, pair: Pair, body: Json):
        super().__init__()
        self._pair, self._body = pair, body
        self.found: list[str] = []

    def run(self) -> None:
        client = Client(self._pair.warm.host)
        reply = client.ask(Chat(), self._body)
        client.close()
        self._reply = reply

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        self._pair.cold.forget()
        cold = self._pair.cold.ask(Chat(), self._body)
        if self._reply.choices[0].shown != cold.choices[0].shown:
            self.found.append(f"beside: {self._reply.choices[0].shown}, {cold.choices[0].shown}")


def _stop_of(drawn: tuple[str, Any], choices: Sequence[Said], step: Step) -> str | None:
    kind, value = drawn
    if kind != "part":
        return str(value)
    if not choices:
        return None
    text = choices[int(step.place * len(choices))].text
    at, size = int(value[0] * len(text)), value[1]
    return text[at : at + size] or None


def _message(reply: Reply) -> str:
    try:
        return str(json.loads(reply.error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.error
