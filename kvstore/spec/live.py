"""The identity of a live transformers model, and the check that the model has not changed since.

The identity is a digest over the model's tensors, its configuration, and two more inputs of the forward pass: tables
that are in no state dict and differ from those that the configuration makes (a model cast to bfloat16 has rounded
rotations), and the precision of products."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch

from kvstore.spec.configuration import described, named
from kvstore.spec.plain import (
    check_functions,
    check_global_hooks,
    check_plain,
    check_untouched,
    modeling_of,
    numbers_of,
    walked,
)
from kvstore.spec.products import precision_of_products
from kvstore.spec.weights import WeightsWatch, digested

_known: weakref.WeakKeyDictionary[Any, Identity] = weakref.WeakKeyDictionary()


class _Module:
    """The state of one module at the time of the digest. It does not keep the module alive."""

    __slots__ = ("config", "forward", "names", "numbers", "ref")

    def __init__(self, module: torch.nn.Module) -> None:
        self.forward = type(module).forward
        self.ref = weakref.ref(module)
        self.config = module.__dict__.get("config")
        self.names = numbers_of(module)
        self.numbers = tuple(map(module.__dict__.get, self.names))


class Identity:
    """One model at the time of its digest. It keeps neither the model nor its weights alive."""

    def __init__(self, model: Any) -> None:
        """Digest the model. Raises InvalidRequest when its configuration and tensors do not fully describe it."""
        plain = check_plain(model)
        self._on_gpu = any(each.is_cuda for each in model.parameters())
        self._precision = precision_of_products(on_gpu=self._on_gpu)
        self._configuration, self._config = described(model.config), copy.deepcopy(vars(model.config))
        self._modules, self._modeling = [_Module(each) for each in walked(model)], modeling_of(model)
        others = {id(each.config): each.config for each in self._modules}
        self._others = [
            (config, copy.deepcopy(vars(config)))
            for config in others.values()
            if config is not None and config is not model.config
        ]
        self._watch = WeightsWatch(self._tensors(model) or [])
        state, beside = model.state_dict(), _tables(model, plain)
        found = digested(state)
        self._watch.learn({state[name].data_ptr(): pieces for name, pieces in found.pieces.items()})
        if self._precision:
            beside["float32_matmul_precision"] = self._precision
        self.digest = named(found.digest, self._configuration, beside)

    def holds(self, model: Any) -> bool:
        """True when the model is unchanged, by checks that take a millisecond or a few and read no weights. Raises
        InvalidRequest when its configuration and tensors do not describe it any more, for example because of a new
        hook."""
        if precision_of_products(on_gpu=self._on_gpu) != self._precision:
            return False
        check_functions(getattr(model.config, "_attn_implementation", None), self._modeling)
        if any(vars(config) != was for config, was in self._others):
            return False
        if vars(model.config) != self._config and described(model.config) != self._configuration:
            return False
        tensors = self._tensors(model)
        return tensors is not None and self._watch.holds(tensors)

    def _tensors(self, model: torch.nn.Module) -> list[torch.Tensor] | None:
        """Return all tensors of the modules; None when the modules or their numbers have changed. All in one pass,
        because it is half the cost of each use."""
        check_global_hooks()
        tensors: list[torch.Tensor | None] = []
        stack, known = [model], iter(self._modules)
        while stack:
            each, was = stack.pop(), next(known, None)
            own = each.__dict__
            if "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"] or "_compiled_call_impl" in own:
                check_untouched(each)
            if was is None or was.ref() is not each or type(each).forward is not was.forward:
                return None
            if own.get("config") is not was.config:
                return None
            if tuple(map(own.get, was.names)) != was.numbers:
                return None
            tensors += own["_parameters"].values()
            tensors += own["_buffers"].values()
            stack += own["_modules"].values()
        return None if next(known, None) else [tensor for tensor in tensors if tensor is not None]


def identity_of(model: Any, *, anew: bool = False) -> Identity:
    """Return the known identity when the model is unchanged; else digest it again, which reads all weights. ``anew``:
    always digest it again."""
    known = _known.get(model)
    if anew or known is None or not known.holds(model):
        known = _known[model] = Identity(model)
    return known


def _tables(model: torch.nn.Module, plain: torch.nn.Module) -> dict[str, str]:
    """Return digests, by module, of the buffers that are in no state dict and differ from those that the configuration
    makes, in any bit."""
    found = {}
    for prefix, each in model.named_modules():
        names = [name for name in each._non_persistent_buffers_set if each._buffers[name] is not None]
        if not names:
            continue
        fresh = type(each)(plain.config)  # on a real device: the skeleton is on the meta device
        odd = {name: each._buffers[name] for name in names}
        odd = {name: has for name, has in odd.items() if not _same(has, fresh._buffers.get(name))}
        if odd:
            found[prefix] = digested(odd).digest
    return found


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype:
        return one is other
    return torch.equal(one.cpu(), other.cpu())
