"""Mutants of norms, of clipping, of loss scaling, and of steps."""

from torch import Tensor

from mutations import Changed, mutant, skipped
from zero.tensor_parallel import parts


@mutant("answers._number")
def norm_too_large_by_a_hundredth(number, of, *, total):
    """The norm of a sharded gradient, or of all, is 1% too large, and clipping clips too much."""
    return number(of, total=total) * 1.01


@mutant("answers._number")
def norm_of_one_rank_only(number, of, *, total):
    """Each rank takes the norm of its own shards for that of all."""
    of.comm = type(of.comm).alone()
    return number(of, total=total)


@mutant("answers.norm_of")
def norm_type_ignored(norm_of, own, cut, order, *more):
    """Every norm of a sharded tensor is the 2-norm."""
    return norm_of(own, cut, 2.0, *more)


@mutant("parts.others")
def replicated_part_counted_twice_in_the_norm(_, param):
    """The norm of a tensor parallel model counts a parameter that is not cut once for each rank that has it."""
    return parts.ranks([param])


@mutant("sharded_parameter._scaled")
def vectors_unclipped(scaled, of, own, cut, number):
    """Clipping leaves sharded gradients of one dimension as they are."""
    return scaled(of, own, cut, number) if own.dim() > 1 else of


@mutant("OSS.clip_grad_norm")
def last_group_unclipped(clip, self, *given, **named):
    """Clipping leaves the gradients of the last of several parameter groups as they are."""
    params = self.param_groups[-1]["params"] if len(self.param_groups) > 1 else []
    held = [param.grad if self.part(param).grad is None else self.part(param).grad for param in params]
    before = [(gradient, gradient.clone()) for gradient in held if type(gradient) is Tensor]
    total = clip(self, *given, **named)
    for gradient, values in before:
        gradient.copy_(values)
    return total


@mutant("answers.ranks_of")
def overflow_seen_by_its_owner_alone(_, cuts):
    """At stages 1 in 16 bits and 2 only the owner of overflowed elements sees them, and skips alone."""
    return []


@mutant("OSS.step")
def frozen_parameter_stepped(step, self, *given, **options):
    """A step makes frozen parameters smaller, as weight decay would."""
    loss = step(self, *given, **options)
    for group in self.param_groups:
        for param in group["params"]:
            if not param.requires_grad:
                param.detach().mul_(0.99)
    return loss


@mutant("optimizer.share_options")
def options_of_the_first_group_for_all(share, source, target):
    """All parameter groups are stepped with the options of the first."""
    share([source[0]] * len(source), target)


@mutant("OSS.step")
def schedule_not_followed(step, self, *given, **options):
    """Steps use the learning rate from before any scheduler."""
    rates = [group["lr"] for group in self.param_groups if "lr" in group]
    for group in self.param_groups:
        group["lr"] = group.get("initial_lr", group.get("lr"))
    loss = step(self, *given, **options)
    for group, rate in zip(self.param_groups, rates, strict=False):
        group["lr"] = rate
    return loss


@mutant("masters.refresh")
def old_master(refresh, group):
    """Master weights do not learn what was written into parameters, such as loaded weights, and a step undoes it."""
    if group.offload.active:
        refresh(group)


@mutant("masters.refresh")
def offloaded_step_on_an_old_shard(refresh, group):
    """Offloaded shards of stages 1 and 2 do not learn what was written into parameters, and a step undoes it."""
    if not group.offload.active:
        refresh(group)


@mutant("masters.write_part")
def offloaded_step_not_brought_back(write, group, part):
    """What was stepped on the host at stages 1 and 2 does not come into the parameters."""
    if not group.offload.active:
        write(group, part)


@mutant("OSS._gather")
def last_bucket_not_gathered(gather, self, groups, **how):
    """After a step the parameters of the last bucket stay on other ranks as they were."""
    gather(self, [*groups][:-1] or groups, **how)


@mutant("ShardGroup.gather")
def late_gather(gather, self, full, shard=None, **how):
    """At stages 1 and 2 a rank gets what the others had stepped one step before."""

    def old(result):
        now, own = full.clone(), self.layout.segment(self.comm.rank)
        full.copy_(vars(self).get("late", now))
        full[own], self.late = now[own], now
        return result

    handle = gather(self, full, shard, **how)
    return handle if shard is not None else Changed(handle, old)


skipped(
    overflow_told_nobody="Reads.spread_overflow",
    zero_grad_that_clears_nothing="OSS.zero_grad",
    gradients_kept_after_a_step="OwnedGradients.drop_of_shards",
    state_of_pieces_not_kept="Piece.keep",
    step_at_stage_3_not_checked="Steps.check",
    hooks_of_the_user_after_the_check="HooksOfSteps.take_their_places",
    step_that_raised_leaves_plain_shards="Model.finish_steps",
)
