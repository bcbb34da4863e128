"""The public face of the runner: load a bundle, ask it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from clover_compile.runtime import decode as ways
from clover_compile.runtime.auto import WIDTHS, Chooser, auto
from clover_compile.runtime.cores import processor
from clover_compile.runtime.costs import CostTable
from clover_compile.runtime.engine import Array, Clock, Engine, Sizes
from clover_compile.runtime.errors import Faults
from clover_compile.runtime.experience import Experience
from clover_compile.runtime.pick import Response
from clover_compile.runtime.request import AUTO, MAX_WIDTH, Request, check, check_prompt, is_whole
from clover_compile.runtime.rules import GenerationRules
from clover_compile.runtime.state import State
from clover_compile.runtime.step import OnStep
from clover_compile.runtime.strict_json import quote

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Sequence[int]


class Text(Protocol):
    """Between text and ids."""

    def encode(
        self,
        prompt: str | Messages,
        raw: bool = False,
        thinking: bool | None = None,
        tools: Messages | None = None,
    ) -> list[int]:
        """Ids of one user message, of a conversation, or of raw text."""
        ...

    def decode(self, ids: Sequence[int]) -> tuple[str, str | None]:
        """Text and reasoning of a response."""
        ...


@dataclass(frozen=True)
class Generation:
    """One response."""

    token_ids: tuple[int, ...]
    """The stop id included."""
    text: str
    reasoning: str | None
    """What stood before the end of thinking, if the response thinks."""
    finish_reason: str
    """`stop` or `length`."""
    stats: dict[str, Any]


class Session:
    """A loaded bundle. Sessions share nothing that changes, so several may run at once.

    `costs_fault` says why a costs.json that is there cannot be used; only `auto` needs one.

    `experience` is what decoding by `auto` has learned from the requests so far; of requests that
    run at once the one that ends last leaves its own.
    """

    def __init__(
        self, engine: Engine, sizes: Sizes, rules: GenerationRules, context: int,
        text: Text | None = None, costs: CostTable | None = None, costs_fault: str | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.sizes, self.rules = engine, sizes, rules
        self.context, self.text, self.costs = context, text, costs
        self.costs_fault = costs_fault
        self.experience = Experience()

    @classmethod
    def load(
        cls, path: str | Path, *, unverified: bool = False, allow_native: bool = False
    ) -> Session:
        """Opens a bundle; refuses one that is damaged, not for this machine, or not proved.

        `unverified` also opens one whose verdict is not `passed`; `allow_native` lets it load
        shared libraries of its own.
        """
        from clover_compile.runtime.bundle import load

        loaded = load(path, unverified=unverified, allow_native=allow_native)
        return cls(
            loaded.engine, loaded.sizes, loaded.rules, loaded.context, loaded.text, loaded.costs,
            loaded.costs_fault,
        )  # fmt: skip

    def costs_caution(self) -> str | None:
        """Why the costs that `auto` goes by may not be those of this machine; None if nothing says
        so.
        """
        if self.costs is None:
            return None
        return self.costs.caution(processor(), getattr(self.engine, "threads", None))

    def new_state(self) -> State:
        """The state of an empty sequence, kept where the engine computes."""
        make: Callable[[Sizes, int], State] = getattr(self.engine, "new_state", State)
        return make(self.sizes, self.context)

    def commit(self, state: State, ids: Sequence[int]) -> Array:
        """Commits ids; returns fp32 logits [T, V] of all rows; `state` advances.

        Raises Faults or ContextFull, and then nothing was committed.
        """
        rows, logits = self._rows(ids), []
        state.require(rows.shape[1])
        for start in range(0, rows.shape[1], ways.COMMIT_ROWS):
            part = rows[:, start : start + ways.COMMIT_ROWS]
            feeds = {"ids": part, "keep": np.array(part.shape[1], np.int32), **state.feeds()}
            new = self.engine.run("commit", feeds)
            state.advance(part.shape[1], new)
            logits.append(new["logits"][0])
        return np.concatenate(logits)

    def preview(self, state: State, ids: Sequence[int]) -> Array:
        """One denoising evaluation of a block (mask id where open): fp32 logits [n, V].

        Raises Faults or ContextFull for a block that is not usable. `state` stays as it is.
        """
        rows = self._rows(ids)
        if rows.shape[1] > MAX_WIDTH:
            raise Faults("ids", (f"a block has at most {MAX_WIDTH} rows, not {rows.shape[1]}",))
        state.require(rows.shape[1])
        logits = self.engine.run("preview", {"ids": rows, **state.feeds()})["logits"]
        block: Array = logits[0]
        return block

    def _rows(self, ids: Sequence[int]) -> Array:
        vocab = self.sizes.vocab_size
        if not len(ids) or not all(is_whole(x) and 0 <= x < vocab for x in ids):
            raise Faults("ids", (f"must be one or more whole numbers of 0..{vocab - 1}",))
        return np.array([ids], np.int64)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        decode: str = "denoise",
        accept: str = "release",
        width: int = 16,
        block_size: int | None = None,
        threshold: float | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        thinking: bool | None = None,
        exact: bool = False,
        state: State | None = None,
        on_step: OnStep | None = None,
        raw: bool = False,
        tools: Messages | None = None,
    ) -> Generation:
        """Answers a prompt: a string (one user message), a conversation, or ids.

        A conversation is a list of messages {role, content}, the role one of system, user,
        assistant and tool; `tools` are objects that its chat template describes to the model.

        `decode` is `denoise`, `causal` or `self-speculate`; `accept` (`release` or `exact`) and
        `width` belong to the last. `auto` picks among them, and the width, before every round; it
        needs the bundle's costs. `exact` allows only ways whose text is that of causal decoding.
        `block_size` and `threshold` override the checkpoint's; a row is fixed when its confidence
        is above the threshold, not when it equals it.
        Temperature 0 is greedy; `seed` repeats a draw. With `state` the prompt is appended to it
        and every emitted row is committed on return. `raw` encodes a string as it is. Raises
        Faults if the request is wrong; a request is refused before anything runs.
        """
        options = {
            "max_new_tokens": max_new_tokens, "decode": decode, "accept": accept, "width": width,
            "block_size": block_size, "threshold": threshold, "temperature": temperature,
            "top_k": top_k, "top_p": top_p, "seed": seed, "exact": exact,
        }  # fmt: skip
        request, ids = self._checked(options, prompt, (raw, thinking, tools), state)
        run = ways.Run(
            engine=Clock(self.engine),
            state=self.new_state() if state is None else state,
            response=Response(self.sizes, self.rules, request.sampling),
            budget=request.max_new_tokens,
            keep_state=state is not None,
            on_step=on_step,
        )
        self._decode(run, ids, request)
        return self._generation(run, len(ids))

    def _checked(
        self, options: dict[str, Any], prompt: object, form: tuple[bool, Any, Any], state: object
    ) -> tuple[Request, list[int]]:
        """The checked request and prompt ids; raises Faults with what is wrong of both."""
        faults: list[str] = []
        request, ids, used, context = None, list[int](), 0, self.context
        try:
            no_costs = None if self.costs is not None else self.costs_fault or "there is none"
            request = check(options, self.rules, no_costs)
        except Faults as error:
            faults += error.faults
        if isinstance(state, State):
            used, context = state.length, min(context, state.context)
        elif state is not None:
            faults.append(f"state must come from new_state or fork, not be {quote(state)}")
        try:
            ids = self._encode(prompt, *form)
            check_prompt(ids, request, self.sizes, self.rules, used, context)
        except Faults as error:
            faults += error.faults
        if faults or request is None:
            raise Faults("request", tuple(faults))
        return request, ids

    def _encode(self, prompt: object, raw: bool, thinking: Any, tools: Any) -> list[Any]:
        if thinking is not None and not isinstance(thinking, bool):
            raise Faults("request", (f"thinking must be True or False, not {quote(thinking)}",))
        if not isinstance(prompt, (str, Sequence, np.ndarray)):
            kinds = "a string, a list of messages or a list of ids"
            raise Faults("request", (f"the prompt must be {kinds}, not {quote(prompt)}",))
        if len(prompt) == 0:
            raise Faults("request", ("the prompt is empty",))
        if isinstance(prompt, str) or (
            isinstance(prompt, Sequence) and isinstance(prompt[0], Mapping)
        ):
            if self.text is None:
                raise Faults("request", ("this session has no tokenizer; give ids",))
            return self.text.encode(prompt, raw=raw, thinking=thinking, tools=tools)
        if raw or thinking is not None or tools is not None:
            raise Faults("request", ("raw, thinking and tools have no effect on a prompt of ids",))
        return [int(x) if isinstance(x, np.integer) else x for x in prompt]

    def _decode(self, run: ways.Run, ids: Sequence[int], request: Request) -> None:
        if request.decode == "denoise":
            ways.denoise(run, ids, request.block_size, request.threshold)
        elif request.decode == "causal":
            ways.causal(run, ids)
        elif request.decode == AUTO:
            chooser = self._chooser(request)
            auto(run, ids, chooser)
            self.experience = chooser.seen
        else:
            ways.self_speculate(run, ids, request.width, request.exact_accept)

    def _chooser(self, request: Request) -> Chooser:
        assert self.costs is not None
        return Chooser(
            self.costs, self.experience.copy(), "exact" if request.exact_accept else "release",
            () if request.sampling.temperature > 0 else WIDTHS,
            0 if request.exact else request.block_size, request.threshold,
        )  # fmt: skip

    def _generation(self, run: ways.Run, prompt_tokens: int) -> Generation:
        ids, counts = run.response.ids, run.counts
        text, reasoning = ("", None) if self.text is None else self.text.decode(ids)
        assert isinstance(run.engine, Clock)
        stats: dict[str, Any] = {
            "prompt_tokens": prompt_tokens, "new_tokens": len(ids), "blocks": counts.blocks,
            "passes": counts.passes, "commits": counts.commits, "rounds": counts.rounds,
            "drafts_kept": counts.drafts_kept,
            "tokens_per_pass": counts.after_passes / counts.passes if counts.passes else None,
            "seconds": dict(run.engine.seconds),
        }  # fmt: skip
        if counts.choices:
            stats["choices"] = counts.choices
        return Generation(tuple(ids), text, reasoning, "stop" if run.stopped else "length", stats)
