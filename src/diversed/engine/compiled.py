"""Forward passes as compiled graphs of fixed shapes: for a single sequence, where the time goes into calls.

A pass of a small model over one to six tokens is hundreds of tiny operations, and starting them takes longer than what
they do. torch.compile makes a few kernels of them; on a CPU it also folds the weights into the order that oneDNN
multiplies fastest. All tokens of a draft are one graph, sampling included. Shapes must not change from call to call:
buffers have their final size from the start, and a pass over fewer tokens than the graph takes is filled up.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch._inductor.config
from torch import Tensor
from transformers import Cache, PreTrainedModel

from diversed.engine.attention import grouped_attention
from diversed.verification import sample

SMALLEST = 256  # slots; buffers come in powers of two, so that few sizes are ever compiled
ON_CPU = {
    "freezing": True,  # weights are constants and laid out anew
    "cpp_wrapper": True,  # kernels are started from C++: Python takes longer than a small kernel
    "cpp.enable_concat_linear": True,  # layers that read the same input are one product
    "max_autotune_gemm_backends": "CPP,ATEN",
    "max_autotune_report_choices_stats": False,
}
CACHED = 32 << 20  # bytes: a model that large does not stay in a CPU's cache between passes


def capacity_for(length: int) -> int:
    """The buffer size for sequences of up to so many tokens."""
    return max(SMALLEST, 1 << (length - 1).bit_length())


class Buffers(Cache):  # type: ignore[misc]
    """What :class:`~diversed.engine.cache.SlotCache` holds, as a graph sees it: all slots at once."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], slots: Tensor) -> None:
        super().__init__(layers=[])
        self.keys, self.values, self.slots = keys, values, slots

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        key, value = self.keys[layer_idx], self.values[layer_idx]
        key[:, :, self.slots[0]] = key_states
        value[:, :, self.slots[0]] = value_states
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.keys[0].shape[2], 0

    def __len__(self) -> int:
        return len(self.keys)


Made = TypeVar("Made")


class CompiledModel:
    """A model's passes over one sequence as graphs, each made when it is first needed.

    Args:
        forward: (tokens [1, T], slots [1, T], cache, extent) to logits [1, T, V] in float32.
    """

    def __init__(self, model: PreTrainedModel, forward: Callable[[Tensor, Tensor, Cache, int], Tensor]) -> None:
        layer = model.get_output_embeddings()
        self.config = model.config.get_text_config(decoder=True)
        self.on_cpu = next(layer.parameters()).device.type == "cpu"
        self.cached = sum(p.numel() * p.element_size() for p in model.parameters()) < CACHED
        self.graphs: dict[tuple[object, ...], Callable[..., Any]] = {}
        self.tracing = False
        entering: list[Tensor] = []
        layer.register_forward_pre_hook(lambda _, args: entering.append(args[0]) if self.tracing else None)

        def step(tokens: Tensor, slots: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
            logits = forward(tokens, slots, Buffers(keys, values, slots), keys[0].shape[2])
            return logits, entering.pop()

        def draft(
            pending: Tensor,
            count: Tensor,
            start: Tensor,
            u: Tensor,
            temperature: Tensor | None,
            keys: list[Tensor],
            values: list[Tensor],
        ) -> tuple[Tensor, Tensor, Tensor]:
            tokens: list[Tensor] = []
            probs: list[Tensor] = []
            hidden: list[Tensor] = []
            feed, slots, at = pending, start + torch.arange(2, device=start.device).unsqueeze(0), count - 1
            for i in range(u.shape[1]):
                logits, states = (each.index_select(1, at)[:, 0] for each in step(feed, slots, keys, values))
                probs.append(torch.softmax(logits if temperature is None else logits / temperature, -1))
                hidden.append(states)
                tokens.append(probs[-1].argmax(-1) if temperature is None else sample(probs[-1], u[:, i]))
                feed, slots, at = tokens[-1].unsqueeze(1), (start + count + i).unsqueeze(0), torch.zeros_like(at)
            return torch.stack(tokens, 1), torch.stack(probs, 1), torch.stack(hidden, 1)

        self._step, self._draft = step, draft

    def step(self, tokens: Tensor, slots: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
        """One pass: logits [1, T, V] in float32 and the hidden states [1, T, H] that enter the output layer."""
        return self._run(("step", tokens.shape[1], keys[0].shape[2]), self._step, tokens, slots, keys, values)

    def draft(
        self,
        pending: Tensor,
        count: Tensor,
        start: Tensor,
        u: Tensor,
        temperature: Tensor | None,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As many tokens in a row as there are draws ``u`` [1, n], sampling included.

        Args:
            pending: [1, 2], the last tokens, the second one filling where ``count`` [1] is 1.
            start: [1], the slot of the first of them.
            temperature: [], or None for the most probable tokens (at the probabilities of temperature 1).

        Returns:
            tokens [1, n], the probabilities they were drawn from [1, n, V], hidden states [1, n, H].
        """
        key = ("draft", u.shape[1], keys[0].shape[2], temperature is None)
        return self._run(key, self._draft, pending, count, start, u, temperature, keys, values)

    def _options(self, key: tuple[object, ...]) -> dict[str, object]:
        """The compiler's switches for a graph.

        A call of oneDNN costs 20 microseconds, whatever the product, and small ones are faster as generated code. The
        compiler times its variants on weights that lie in the cache, though: over several rows and weights that have
        to come from memory it picks worse ones than oneDNN.
        """
        if not self.on_cpu:
            return {}
        several_rows = key[0] == "step" and key[1] != 1
        return ON_CPU | {"max_autotune": self.cached or not several_rows}

    def _run(self, key: tuple[object, ...], function: Callable[..., Made], *args: Any) -> Made:
        result: Made
        if key in self.graphs:
            result = self.graphs[key](*args)
            return result
        graph = unguarded(function)
        self.tracing = True  # the compiler follows the hook now; a graph does what it saw
        try:
            known = set(torch._inductor.list_options())
            options = {name: value for name, value in self._options(key).items() if name in known}
            # The switches count while a graph is made.
            with torch._inductor.config.patch(options), silent_choices(), grouped_attention(self.config):
                result = graph(*args)
        finally:
            self.tracing = False
        self.graphs[key] = graph
        return result


@contextlib.contextmanager
def silent_choices() -> Iterator[None]:
    """The compiler prints a table for every product it tries variants of."""
    from torch._inductor import select_algorithm  # not before it is needed: it takes a second

    before, select_algorithm.PRINT_AUTOTUNE = select_algorithm.PRINT_AUTOTUNE, False
    try:
        yield
    finally:
        select_algorithm.PRINT_AUTOTUNE = before


def unguarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled for the shapes of its first call, which all later ones must have.

    Checking anew on every call that nothing of a model has changed takes longer than a small model's pass. Compiled
    code hangs on the code object: a copy keeps the graphs of different shapes apart.
    """
    copy = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )
    return torch.compile(copy, dynamic=False, options={"guard_filter_fn": lambda guards: [False] * len(guards)})
