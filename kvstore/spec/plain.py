"""The check that a live model computes exactly what its configuration and its tensors say.

It passes when the modules, their numbers and their configurations are those that transformers makes of the model's
configuration, no hook can change values, no ``forward`` was replaced, and attention and all that the forward passes
call is transformers' own. Then configuration and tensors identify its K and V. Any other model (an unmerged adapter,
quantised layers, a compiled or patched forward pass) is refused; the error names the module."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvstore.errors import InvalidRequest
from kvstore.spec.configuration import described

OWN_FORWARDS = ("torch.nn.modules.", "transformers.models.", "transformers.activations")
OWN_FUNCTIONS = ("transformers.", "torch.")
FUNCTIONS = (FunctionType, partial)
OBSERVING = "transformers.utils.output_capturing"
"""The module of transformers' own hooks: they record hidden states, and change none."""
UNREAD = ("training", "gradient_checkpointing", "name_or_path", "max_seq_len_cached")
"""Attributes of modules that do not affect K and V of a model in evaluation."""
VOUCH = "or vouch for it by name: spec=ModelSpec.from_transformers(model.config, 'unverified:<name>')"
Module = torch.nn.Module


def walked(model: Module) -> Iterator[Module]:
    """Yield every module, as often as it occurs in the model, the last child first."""
    stack = [model]
    while stack:
        each = stack.pop()
        yield each
        stack += each.__dict__["_modules"].values()


def numbers_of(module: Module) -> tuple[str, ...]:
    """Return the names of a module's own attributes that are numbers, strings, booleans or None."""
    kinds = (bool, int, float, str, type(None))
    found = vars(module).items()
    return tuple(name for name, value in found if name[0] != "_" and name not in UNREAD and isinstance(value, kinds))


def check_global_hooks() -> None:
    """Raises InvalidRequest for PyTorch's global forward hooks, which act on all modules."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise InvalidRequest(f"forward hooks of all modules may change what they compute: remove them, {VOUCH}")


def modeling_of(model: Module) -> list[dict[str, Any]]:
    """Return what the names stand for in the modules of transformers that define the model's forward passes."""
    names = {type(each).forward.__module__ for each in walked(model)}
    return [vars(sys.modules[name]) for name in sorted(names) if name.startswith("transformers.models.")]


def check_functions(attention: str | None, modeling: Iterable[dict[str, Any]]) -> None:
    """Raises InvalidRequest when the kernels of ``attention``, its masks, or a function that the forward passes call
    are not transformers' own: their names are in the key, what they compute is not."""
    known = [registered.get(attention) for registered in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
    called = [each for names in modeling for each in list(names.values()) if isinstance(each, FUNCTIONS)]
    for each in (*known, *called, torch.nn.functional.scaled_dot_product_attention):
        if each is not None and (home := _foreign_home(each)) is not None:
            raise InvalidRequest(
                f"the forward pass calls {home}.{getattr(each, '__qualname__', each)!s:.80}, not a function of "
                f"transformers: what it computes is in no key. Take transformers' own, {VOUCH}"
            )


def _foreign_home(function: Any) -> str | None:
    """Return the name of the module that defines a function, of a partial one that of what it calls; None where that is
    PyTorch or transformers. What functools.wraps made has the name of what it wraps, and the variables of its own
    module; what it wraps may be a wrapper, too."""
    called = getattr(function, "func", function)
    while called is not None:
        variables = getattr(called, "__globals__", {})
        for each in (variables.get("__name__", "torch"), getattr(called, "__module__", "")):
            if not f"{each}.".startswith(OWN_FUNCTIONS):
                return str(each)
        called = getattr(called, "__wrapped__", None)
    return None


def check_untouched(module: Module) -> None:
    """Raises InvalidRequest when a module's forward pass was replaced or compiled, or has a hook that may change it."""
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


def check_plain(model: Any) -> Module:
    """Check a model, and return the same model made from its configuration, without weights. Raises InvalidRequest
    naming the module that differs, and how to go on."""
    check_global_hooks()
    check_functions(getattr(model.config, "_attn_implementation", None), modeling_of(model))
    for each in walked(model):
        check_untouched(each)
        forward = type(each).forward
        if not f"{forward.__module__}.".startswith(OWN_FORWARDS) or _foreign_home(forward) is not None:
            raise InvalidRequest(
                f"the model has a {_called(each)}, not transformers' own: what it computes is in no key. Merge "
                f"adapters (merge_and_unload), load weights unquantised, {VOUCH}"
            )
    made_for = getattr(getattr(type(model), "config_class", None), "model_type", None)
    if made_for != model.config.model_type:  # the fields that both families have would name both alike
        raise InvalidRequest(
            f"the model is a {_called(model)}, which is made for a configuration of {made_for!r}, and has one of "
            f"{model.config.model_type!r}: make it of its own, {VOUCH}"
        )
    plain = _skeleton(model)
    ours, theirs = dict(model.named_modules()), dict(plain.named_modules())
    if ours.keys() != theirs.keys():
        raise InvalidRequest(f"the model has other modules than transformers makes of its configuration: {VOUCH}")
    for name, each in ours.items():
        _check_same(name or "model", each, theirs[name])
        _check_dtype(each, model.dtype)
        config, same = vars(each).get("config"), vars(theirs[name]).get("config")
        if config is not model.config and config is not same and described(config) != described(same):
            raise InvalidRequest(f"{name} reads another configuration than model.config: give it that, {VOUCH}")
    return plain


def _check_dtype(module: Module, dtype: torch.dtype) -> None:
    """Raises InvalidRequest when K or V is of another dtype than the model, and its spec: a cache of it would round."""
    for name in ("k_proj", "v_proj"):
        made = vars(module)["_modules"].get(name)
        if made is not None and made.weight.dtype is not dtype:
            raise InvalidRequest(
                f"the model is {dtype}, and a {name} {made.weight.dtype}: K and V are of the model's dtype. Cast all "
                "of it (model.to), or none"
            )


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
    """Make a model of the same class from the same configuration, on the meta device."""
    try:
        with torch.device("meta"):
            made: Module = type(model)(copy.deepcopy(model.config))
    except Exception as error:  # a user's own class may need any arguments, and raise anything
        raise InvalidRequest(
            f"{_called(model)} cannot be made of its configuration alone ({error}): {VOUCH}"
        ) from error
    return made


def _called(module: Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
