"""An engine for tests: the five Units in float64 NumPy over the oracle; no torch, no bundle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clover_compile.runtime.engine import Array, Arrays
from clover_compile.runtime.rules import GenerationRules
from clover_compile.runtime.session import Session, Text
from tests import oracle

maths: Any = oracle
"""The oracle's untyped functions."""

SMALL: dict[str, Any] = {
    "vocab_size": 40, "mask_token_id": 39, "stop_token_ids": (36, 38), "hidden_size": 16,
    "num_hidden_layers": 2, "full_attention_interval": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 1, "linear_key_head_dim": 6, "linear_num_value_heads": 2,
    "linear_value_head_dim": 5, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 6, "shared_expert_intermediate_size": 6, "block_size": 8,
}  # fmt: skip
"""A model with one layer of each kind, small enough for hundreds of generations."""


class OracleEngine:
    """The Units of the engine protocol, written from the specification; logs (unit, rows)."""

    def __init__(self, truth: oracle.Oracle) -> None:
        self.truth: Any = truth
        self.calls: list[tuple[str, int]] = []

    def run(self, unit: str, feeds: Arrays, outputs: Sequence[str] | None = None) -> Arrays:
        """Runs one Unit in float64; floats come back as float32."""
        self.calls.append((unit, feeds["ids"].shape[1] if "ids" in feeds else 0))
        out: Arrays = getattr(self, f"_{unit}")(feeds)
        rounded = {k: x.astype(np.float32) if x.dtype == np.float64 else x for k, x in out.items()}
        return {k: x for k, x in rounded.items() if outputs is None or k in outputs}

    def _state(self, feeds: Arrays) -> oracle.State:
        c, length = self.truth.c, int(feeds["length"][0])
        state = oracle.State(length)
        for i in range(c.num_hidden_layers):
            if c.is_attention(i):
                k, v = feeds[f"k.{i}"][0], feeds[f"v.{i}"][0]
                assert len(k) == len(v) == length, "the runner hands out exactly `length` rows"
                state.kv[i] = (k.astype(np.float64), v.astype(np.float64))
            else:
                state.ring[i] = feeds[f"ring.{i}"][0].astype(np.float64)
                state.S[i] = feeds[f"S.{i}"][0].astype(np.float64)
        return state

    def _commit(self, feeds: Arrays) -> Arrays:
        state, ids, keep = self._state(feeds), feeds["ids"][0], int(feeds["keep"])
        logits = self.truth.commit(state, ids)
        new = {f"ring.{i}.new": x[None] for i, x in state.ring.items()}
        new |= {f"S.{i}.new": x[None] for i, x in state.S.items()}
        new |= {f"k.{i}.new": k[None, -len(ids) :] for i, (k, _) in state.kv.items()}
        new |= {f"v.{i}.new": v[None, -len(ids) :] for i, (_, v) in state.kv.items()}
        return {"logits": logits[None, len(ids) - keep :], **new}

    def _preview(self, feeds: Arrays) -> Arrays:
        return {"logits": self.truth.preview(self._state(feeds), feeds["ids"][0])[None]}

    def _verify(self, feeds: Arrays) -> Arrays:
        """The causal pass without a state output: rows of k and v, and tapes for `replay`."""
        o, c, w = self.truth, self.truth.c, self.truth.w
        state, ids = self._state(feeds), feeds["ids"][0]
        pos = np.arange(state.length, state.length + len(ids))
        h: Array = w["model.embed_tokens.weight"][ids]
        new: Arrays = {}
        for i in range(c.num_hidden_layers):
            p = f"model.layers.{i}."
            x = maths.rms(h, w[p + "input_layernorm.weight"], c.rms_norm_eps)
            if c.is_attention(i):
                q, k, v, g = o._qkvg(p + "self_attn.", x, pos)
                new |= {f"k.{i}.new": k[None], f"v.{i}.new": v[None]}
                k, v = np.concatenate([state.kv[i][0], k]), np.concatenate([state.kv[i][1], v])
                seen = o._attend(q, k, v, np.arange(len(k))[None] <= pos[:, None])
                mixed = (seen * maths.sigmoid(g)).reshape(len(ids), -1)
                h = h + mixed @ w[p + "self_attn.o_proj.weight"].T
            else:
                p += "linear_attn."
                u, b, a, z = (x @ w[f"{p}in_proj_{n}.weight"].T for n in ("qkv", "b", "a", "z"))
                new[f"tape.{i}"] = np.concatenate([u, b, a], -1)[None]
                read, _ = self._scan(p, state.ring[i], state.S[i], u, b, a)
                h = h + o._gdn_out(p, read, z)
            p = f"model.layers.{i}."
            x = maths.rms(h, w[p + "post_attention_layernorm.weight"], c.rms_norm_eps)
            h = h + o._moe(p + "mlp.", x, coreset=False)
        x = maths.rms(h, w["model.norm.weight"], c.rms_norm_eps)
        return {"logits": (x @ w["lm_head.weight"].T)[None], **new}

    def _replay(self, feeds: Arrays) -> Arrays:
        c, rows, new = self.truth.c, int(feeds["rows"][0]), {}
        for i in (i for i in range(c.num_hidden_layers) if not c.is_attention(i)):
            ring, S = (feeds[f"{n}.{i}"][0].astype(np.float64) for n in ("ring", "S"))
            tape, channels = feeds[f"tape.{i}"][0, :rows].astype(np.float64), ring.shape[1]
            u, b, a = np.split(tape, [channels, channels + c.linear_num_value_heads], -1)
            _, S = self._scan(f"model.layers.{i}.linear_attn.", ring, S, u, b, a)
            new[f"ring.{i}.new"] = np.concatenate([ring, u])[None, -len(ring) :]
            new[f"S.{i}.new"] = S[None]
        return new

    def _scan(
        self, p: str, ring: Array, S: Array, u: Array, b: Array, a: Array
    ) -> tuple[Array, Array]:
        """Read-outs [T, HV, DV] and the last S of the recurrence of section 2."""
        c, w = self.truth.c, self.truth.w
        full, taps = np.concatenate([ring, u]), w[p + "conv1d.weight"][:, 0]
        width = c.linear_conv_kernel_dim
        q, k, v = self.truth._split(
            maths.silu(sum(full[j : j + len(u)] * taps[:, j] for j in range(width)))
        )
        decay = np.exp(-np.exp(w[p + "A_log"]) * np.logaddexp(0, a + w[p + "dt_bias"]))
        beta, out = maths.sigmoid(b), np.zeros_like(v)
        for t in range(len(u)):
            S = S * decay[t][:, None, None]
            d = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", S, k[t]))
            S = S + k[t][:, :, None] * d[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", S, q[t]) / np.sqrt(c.linear_key_head_dim)
        return out, S

    def _pick(self, feeds: Arrays) -> Arrays:
        """Row by row: a response is rebuilt from the counts and given to the oracle."""
        end, draft = self.truth.c.think_end_token_id, feeds["draft"][0]
        response = np.repeat(np.arange(self.truth.c.vocab_size), feeds["counts"][0]).tolist()
        self._check_scalars(feeds["scalars"])
        rows = []
        for j, logits in enumerate(feeds["logits"][0].astype(np.float64)):
            before = draft[:j].tolist() if feeds["running"] else []
            close = bool(feeds["close_open"][0]) and end not in before
            position = int(feeds["row0"][0]) + j
            x = self.truth.process(logits, response + before, position, close)
            if np.isnan(logits).any():
                rows.append((0, np.nan, np.nan, np.nan))
                continue
            p = maths.softmax(x)
            token = int(x.argmax())
            if feeds["scalars"][9] > 0:
                token = draw(x, feeds["scalars"], float(feeds["noise"][0, j]))
            confirmed = p[draft[j]] if draft[j] >= 0 else 0.0
            rows.append((token, p[token], confirmed, -(p[p > 0] * np.log(p[p > 0])).sum()))
        names = ("ids", "confidence", "p_draft", "entropy")
        columns = (np.array(x)[None] for x in zip(*rows, strict=True))
        return dict(zip(names, columns, strict=True))

    def _check_scalars(self, scalars: Array) -> None:
        c = self.truth.c
        want = [
            c.presence_penalty, c.frequency_penalty, c.repetition_penalty,
            c.length_penalty, c.length_penalty_start, c.length_penalty_window,
            c.think_end_bias, c.think_end_start, c.think_end_window,
        ]  # fmt: skip
        assert scalars.dtype == np.float32
        assert scalars.shape == (12,)
        assert np.array_equal(scalars[:9], np.array(want, np.float32))


def allowed(x: Array, scalars: Array) -> Array:
    """Probabilities [V] a token is drawn from: softmax(x / T) after top-k and top-p."""
    temperature, top_k, top_p = (float(s) for s in scalars[9:])
    if top_k > 0:
        x = np.where(x >= np.sort(x)[::-1][min(int(top_k), len(x)) - 1], x, -np.inf)
    p = maths.softmax(x / temperature)
    order = np.argsort(-p, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
    kept = np.zeros_like(p)
    kept[order[before <= top_p]] = p[order[before <= top_p]]
    total: Array = kept / kept.sum()
    return total


def draw(x: Array, scalars: Array, noise: float) -> int:
    """The inverse of the cumulative distribution, tokens in descending order."""
    p = allowed(x, scalars)
    order = np.argsort(-x, kind="stable")
    return int(order[np.searchsorted(np.cumsum(p[order]), noise, side="right")])


class Sizes:
    """The sizes of an oracle's model under the names the runner uses."""

    def __init__(self, c: oracle.Config) -> None:
        kinds = [bool(maths.Config.is_attention(c, i)) for i in range(c.num_hidden_layers)]
        self.layer_types = tuple("full_attention" if k else "linear_attention" for k in kinds)
        self.attention_layers = tuple(i for i, k in enumerate(kinds) if k)
        self.gdn_layers = tuple(i for i, k in enumerate(kinds) if not k)
        key = c.linear_num_key_heads * c.linear_key_head_dim
        self.conv_dim = 2 * key + c.linear_num_value_heads * c.linear_value_head_dim
        self.vocab_size, self.head_dim = c.vocab_size, c.head_dim
        self.num_key_value_heads = c.num_key_value_heads
        self.linear_conv_kernel_dim = c.linear_conv_kernel_dim
        self.linear_num_value_heads = c.linear_num_value_heads
        self.linear_key_head_dim = c.linear_key_head_dim
        self.linear_value_head_dim = c.linear_value_head_dim


def rules_of(c: oracle.Config) -> GenerationRules:
    """The decoding constants of an oracle's model."""
    return GenerationRules(
        tuple(sorted(c.stop_token_ids)), c.mask_token_id, c.block_size, c.threshold,
        c.presence_penalty, c.frequency_penalty, c.repetition_penalty,
        c.length_penalty, c.length_penalty_start, c.length_penalty_window,
        c.think_end_bias, c.think_end_start, c.think_end_window, c.think_end_token_id,
    )  # fmt: skip


def oracle_session(
    *, scale: float = 0.2, seed: int = 0, context: int = 600, text: Text | None = None,
    **fields: Any,
) -> tuple[Session, Any]:  # fmt: skip
    """A session over an oracle of random weights, and that oracle; `fields` override SMALL."""
    c = oracle.Config(**{**SMALL, **fields})
    truth = maths.Oracle(c, maths.random_weights(c, seed, scale))
    return Session(OracleEngine(truth), Sizes(c), rules_of(c), context, text), truth
