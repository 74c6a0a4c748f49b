"""Mutants of what ranks compare and tell one another, and of what `zero` says beforehand."""

import time
from dataclasses import replace

import torch.distributed as dist

from mutations import mutant, skipped


@mutant("Comm.compare")
def error_raised_on_one_rank_only(compare, self, what, lines, own=None, *channel):
    """A constructor's refusal is raised where the problem is, and other ranks wait."""
    if own is not None and self.world > 1:
        raise own
    compare(self, what, lines, own, *channel)


@mutant("Comm.compare")
def differing_ranks_not_noticed(compare, self, what, lines, *more):
    """Ranks that were given different things do not notice it."""
    compare(self, what, [], *more)


@mutant("Together.agree")
def error_of_another_rank_not_raised(_, self, flags=0):
    """At the end of a section ranks do not ask whether another has raised."""
    return flags


@mutant("RaisedText.explained")
def error_of_another_rank_not_named(_, self, reason):
    """Ranks that are out of step with one that has raised do not say what it was."""
    return reason


@mutant("Log.append")
def first_operations_not_compared(append, self, channel, nbytes, compare):
    """Operations that are new are launched without a comparison."""
    append(self, channel, nbytes, lambda channel: None)


@mutant("Peers.finish", "Peers.read")
def memory_written_before_others_have_read_it(before, self, *given):
    """A rank goes on before the others have read its memory, and rank 0 reads late."""
    if before.__name__ == "read":
        time.sleep(0.002 * (dist.is_initialized() and dist.get_rank() == 0))
        before(self, *given)
    else:
        self.announce(before.__globals__["_DONE"])


@mutant("InOneMessage.messages")
def messages_filled_before_they_are_packed(messages, self, taken):
    """All of a message is filled with zeros before gradients are copied into it, and the wire waits for both."""
    self._group.full.new_zeros(self._numel, dtype=self._dtype)
    return messages(self, taken)


@mutant("GradBucket.__init__")
def gradients_of_16_bits_sent_by_all_to_all(init, self, group, *, sent_as=None, **more):
    """Between hosts 16-bit gradients take several times as long as those of float32."""
    init(self, group, sent_as=sent_as or group.full.dtype, **more)


@mutant("join")
def weights_of_join_are_one(join, batches, model):
    """zero.join gives every batch the weight 1, also those that a rank repeats."""
    yield from ((batch, 1.0) for batch, _ in join(batches, model))


@mutant("plan")
def peak_of_the_plan_too_small(plan, *given, **named):
    """The planned peaks are 3% below those of the run."""
    found = plan(*given, **named)
    return replace(found, costs=tuple(replace(cost, peak=int(cost.peak * 0.97)) for cost in found.costs))


@mutant("plan")
def bytes_of_the_plan_too_few(plan, *given, **named):
    """The planned bytes are 3% below those of the run."""
    found = plan(*given, **named)
    return replace(found, costs=tuple(replace(cost, sent=int(cost.sent * 0.97)) for cost in found.costs))


@mutant("traffic")
def gathers_not_counted(traffic):
    """zero.traffic() does not count all-gathers."""
    return replace(traffic(), gather=0)


skipped(
    error_of_one_rank_told_nobody="Together.tell",
    ranks_out_of_step_not_noticed="Log.refuse_differing transport.refuse_differing_logs",
    dead_rank_not_noticed="Watchdog._break",
)
