"""Checks that a live model computes what its configuration and its tensors say, and nothing else.

It does when its modules are those that transformers makes of the configuration, with the numbers it gives them, no hook
changes what passes, and no ``forward`` was replaced. Then the two name its K and V. Any other model (an adapter that is
not merged, quantised layers, a compiled or patched forward pass) is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from kvstore.errors import InvalidRequest

OWN_FORWARDS = ("torch.nn.modules.", "transformers.models.", "transformers.activations")
OBSERVING = "transformers.utils.output_capturing"
"""Where transformers' own hooks come from: they take note of hidden states, and change none."""
UNREAD = ("training", "gradient_checkpointing", "name_or_path", "max_seq_len_cached")
"""Attributes of modules that K and V of a model in evaluation do not depend on."""
VOUCH = "or vouch for it by name: spec=ModelSpec.from_transformers(model.config, 'unverified:<name>')"
Module = torch.nn.Module


def walked(model: Module) -> Iterator[Module]:
    """Every module, as often as it stands in the model, the last child first."""
    stack = [model]
    while stack:
        each = stack.pop()
        yield each
        stack += each.__dict__["_modules"].values()


def numbers_of(module: Module) -> tuple[str, ...]:
    """Names of a module's own numbers, words and switches."""
    kinds = (bool, int, float, str, type(None))
    found = vars(module).items()
    return tuple(name for name, value in found if name[0] != "_" and name not in UNREAD and isinstance(value, kinds))


def check_global_hooks() -> None:
    """Raises InvalidRequest for hooks on every module there is."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise InvalidRequest(f"forward hooks of all modules may change what they compute: remove them, {VOUCH}")


def check_untouched(module: Module) -> None:
    """Raises InvalidRequest when something stands between a module and its class's forward pass."""
    own = module.__dict__
    if "forward" in own or own.get("_compiled_call_impl") is not None:
        raise InvalidRequest(f"the forward pass of a {_called(module)} was replaced or compiled: undo that, {VOUCH}")
    for hook in (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()):
        if not _observes(hook):
            raise InvalidRequest(
                f"a {_called(module)} has a forward hook, which may change K and V: remove it, {VOUCH}"
            )


def _observes(hook: Any) -> bool:
    return bool(getattr(hook, "observes", False)) or getattr(hook, "__module__", "") == OBSERVING


def check_plain(model: Module) -> Module:
    """What transformers makes of the model's configuration, without weights, once it is known to be the same. Raises
    InvalidRequest naming the module that is not, and how to go on."""
    check_global_hooks()
    for each in walked(model):
        check_untouched(each)
        if not (type(each).forward.__module__ + ".").startswith(OWN_FORWARDS):
            raise InvalidRequest(
                f"the model has a {_called(each)}, not transformers' own: what it computes is in no key. Merge "
                f"adapters (merge_and_unload), load weights unquantised, {VOUCH}"
            )
    plain = _skeleton(model)
    ours, theirs = dict(model.named_modules()), dict(plain.named_modules())
    if ours.keys() != theirs.keys():
        raise InvalidRequest(f"the model has other modules than transformers makes of its configuration: {VOUCH}")
    for name, each in ours.items():
        _check_same(name or "model", each, theirs[name])
    return plain


def _check_same(name: str, each: Module, same: Module) -> None:
    if type(each) is not type(same):
        raise InvalidRequest(f"{name} is a {_called(each)}, and a {_called(same)} by the configuration: {VOUCH}")
    for attribute in numbers_of(same):
        ours, theirs = vars(each).get(attribute), vars(same)[attribute]
        if ours != theirs:
            raise InvalidRequest(
                f"{name}.{attribute} is {ours!r:.80}, and {theirs!r:.80} by the model's configuration: make the model "
                f"again from the configuration that is meant, {VOUCH}"
            )


def _skeleton(model: Any) -> Module:
    """The same class made of the same configuration, on no device."""
    try:
        with torch.device("meta"):
            made: Module = type(model)(copy.deepcopy(model.config))
    except Exception as error:  # a class of the user's own may take anything
        raise InvalidRequest(
            f"{_called(model)} cannot be made of its configuration alone ({error}): {VOUCH}"
        ) from error
    return made


def _called(module: Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
