"""An evaluator of its own for loading plans: every stretch that could be loaded, played out chunk by chunk and layer by
layer. Nothing of it is the planner's but the facts."""

from __future__ import annotations

from kvstore.planning.loading import Blend, LoadFacts, Stock


def played_s(facts: LoadFacts, stock: Stock, front: int, stop: int) -> float:
    """Until the first token, with tokens from ``front`` to ``stop`` loaded. Chunks come piece by piece, each piece's
    tokens in order; tiers work side by side. The link behind them takes a layer at a time of what is there."""
    layers, compute = facts.layer_count, facts.compute
    landed = _landed(facts, stock, front, stop)
    now = _steps_s(facts, 0, front) if stop > front else 0.0
    done = stop if stop > front else 0
    step = facts.step_tokens or facts.token_count
    rest = min(step, facts.token_count - done)
    if stop > front:
        work = stock.work_share * compute.token_s * compute.load * (stop - front)
        for layer in range(layers):
            now = max(now, landed[layer]) + (_pass_s(facts, rest, done) + work) / layers
        done += rest
    return now + _steps_s(facts, done, facts.token_count)


def _landed(facts: LoadFacts, stock: Stock, front: int, stop: int) -> list[float]:
    """Return the times at which the layers of these tokens have landed."""
    layers, pieces = facts.layer_count, facts.pieces
    landed = [0.0] * layers
    if stop > front:
        free = {}
        for tier, found in facts.tiers.items():
            free[tier] = found.rate.byte_s * found.queued_bytes + found.rate.latency_s
        link_free = facts.link.latency_s
        for piece in range(pieces):
            inside = [layer for layer in range(layers) if layer * pieces // layers == piece]
            ready = dict.fromkeys(range(front, stop), 0.0)
            for token in ready:
                run = _run_at(stock, token)
                if run.tier in free:
                    free[run.tier] += run.token_bytes * len(inside) / layers * facts.tiers[run.tier].rate.byte_s
                    ready[token] = free[run.tier]
            for layer in inside:
                for token, ready_s in ready.items():
                    size = _run_at(stock, token).token_bytes / layers
                    link_free = max(link_free, ready_s) + size * facts.link.byte_s
                landed[layer] = link_free
    return landed


def best_s(facts: LoadFacts, *, may_meet: bool) -> float:
    """The best of all stretches of whole chunks, of every form; none of them: a plain prefill."""
    best = played_s(facts, Stock(()), 0, 0)
    for stock in facts.stocks:
        usable = min(stock.token_count, facts.reusable_tokens) // facts.unit_tokens
        for stop in range(1, usable + 1):
            for front in range(stop if may_meet else 1):
                best = min(best, played_s(facts, stock, front * facts.unit_tokens, stop * facts.unit_tokens))
    return best


def _run_at(stock: Stock, token: int):
    for run in stock.runs:
        if token < run.token_count:
            return run
        token -= run.token_count
    raise AssertionError("beyond what is stored")


def _pass_s(facts: LoadFacts, new: int, context: int) -> float:
    rate = facts.compute
    attended = sum(context + number + 0.5 for number in range(new))
    return rate.load * (rate.pass_s + rate.token_s * new + rate.pair_s * attended)


def _steps_s(facts: LoadFacts, start: int, stop: int) -> float:
    step = facts.step_tokens or max(1, stop - start)
    return sum(_pass_s(facts, min(step, stop - place), place) for place in range(start, stop, step))


def blend_played_s(facts: LoadFacts, blend: Blend) -> float:
    """Until the first token of a blend, layer by layer: each needs all of its cache, then computes the rows that the
    setting carries there and those of tokens that are not reused. These attend to all that is reused."""
    rate, layers, setting = facts.compute, facts.layer_count, blend.setting
    stock = blend.stock
    landed = _landed(facts, stock, 0, stock.token_count)
    rest = facts.token_count - blend.token_count
    now = 0.0
    for layer in range(layers):
        part = 1.0 if setting.first_layer <= layer < setting.check_layer else 0.0
        if layer >= setting.check_layer:
            part = setting.ratio
        lossy_s = part * _pass_s(facts, blend.lossy_tokens, blend.lossy_stop - blend.lossy_tokens)
        work_s = stock.work_share * rate.token_s * rate.load * stock.token_count
        now = max(now, landed[layer]) + (lossy_s + _pass_s(facts, rest, blend.token_count) + work_s) / layers
    return now
