"""Forms that people write of sharded tensors between steps, for test_operators.py and test_at_rest.py.

t: a sharded tensor. o: another one like it, or a plain one. p: a parameter; ps: all of its model; gs: their gradients.
also: parameters of no model of zero. full and grown: of a list full plain tensors, and tensors without graph.
"""

import itertools
import math
import re
from typing import Any


def listed(text: str) -> list[str]:
    return re.split(r" ; |\n", text.strip())


def compiled(form: str) -> Any:
    """For `eval`: of a form that is a statement, that gives None."""
    try:
        return compile(form, "a form", "eval")
    except SyntaxError:
        return compile(form, "a form", "exec")


EXACT = """
t[0] = 0 ; t[:2] = 0 ; t[..., -1] = 1 ; t[...] = o ; t[t > 0] = 0 ; t[o > 0] = 0.5 ; t[o > 0] ; t[-1] ; t[:, 0]
t[[0]] ; t /= 3 ; t += o ; t -= 0.1 * o ; t **= 2 ; t //= 2 ; t %= o ; 1 / t ; 2**t ; 1 - t ; -t ; abs(t) ; ~(t > 0)
t == o ; t.add_(o, alpha=0.1) ; t.copy_(o) ; t.data.copy_(o) ; o.copy_(t) ; o.mul_(t) ; t.lerp_(o, 0.1)
o.lerp_(t, 0.1) ; t * o ; t.mul_(1 - 0.1 * 0.01) ; t.sign_() ; t.data.mul_(2) ; t.detach().add_(o) ; t.clamp_(-1, 1)
t.clamp(min=o) ; t.round_() ; t.nan_to_num_() ; t.masked_fill_(o > 0, 0) ; torch.where(t > 0, t, o)
torch.where(o > 0, o, t) ; torch.where(t > 0) ; torch.where(t > 0, t, 0.0) ; t.addcmul_(o, o, value=0.1)
t.addcdiv_(o, o + 3) ; torch.add(t, o, out=o) ; t.neg_().exp_() ; torch.mul(t, 2, out=t) ; torch.add(o, 1, out=t)
torch.maximum(t, o) ; t.index_fill_(0, torch.tensor([0]), 1.0) ; t.index_add_(0, torch.tensor([0]), o[:1])
t.index_copy_(0, torch.tensor([0]), o[:1]) ; t.data[o > 0] = 0 ; t.norm(dim=1)
t.norm(dim=-1, keepdim=True) ; t.div_(t.norm(dim=-1, keepdim=True)) ; t.sub_(t.mean(0)) ; t.sum(0)
t.add_(-t.mean(dim=tuple(range(1, t.dim())), keepdim=True)) ; t.renorm_(2, 0, 1.0) ; t.sum(-1, dtype=torch.float64)
t.isfinite().all() ; bool(t.isnan().any()) ; (t == o).all() ; (t > 0).sum() ; (t == 0).float().sum() ; t.any()
t.all() ; t.abs().max().item() ; t.max(), t.min(), t.argmax() ; t.aminmax() ; t.max(0) ; t.abs().amax(-1)
torch.count_nonzero(t) ; torch.equal(t, o) ; torch.allclose(t, o) ; torch.isclose(t, o)
torch.testing.assert_close(t, t.clone()) ; t.equal(t) ; float(t.flatten()[0]) ; float(t) ; int(t) ; complex(t)
bool(t) ; t.item() ; t.tolist() ; t.detach().numpy() ; round(t) ; numpy.asarray(t.detach()) ; t.detach().cpu().numpy()
t.cpu() ; t.to("cpu") ; t.to(torch.float64) ; t.to(o) ; o.to(t) ; t.detach().float().numpy().mean()
t.type(torch.FloatTensor) ; t.float(), t.half() ; t.bfloat16().float() ; t.type_as(o) ; t.contiguous().view(-1)
t.clone(memory_format=torch.contiguous_format).view(-1) ; t.ravel() ; t.view(-1) ; t.T ; t.mT ; t.reshape(-1)[:1]
t.flatten() ; t.unsqueeze(0) ; t.squeeze() ; t.view(torch.uint8) ; t.expand(2, *t.shape) ; t.split(1) ; list(t)
[row.sum() for row in t] ; len(t) ; t.shape, t.numel(), t.dim(), t.size(0), t.nbytes ; 0.0 in t ; copy.deepcopy(t)
copy.copy(t) ; torch.tensor(t) ; torch.as_tensor(t) ; t.new_tensor(t) ; nn.Parameter(t) ; t.clone()
torch.zeros_like(t) ; torch.randn_like(t) ; torch.full_like(t, 2) ; torch.ones_like(t, dtype=torch.int64)
t.new_zeros(2) ; t.add_(torch.randn_like(t)) ; t.normal_() ; t.data.uniform_(-1, 1) ; t.bernoulli_(0.5)
t.exponential_() ; F.dropout(t) ; torch.bernoulli((t > 0).float()) ; torch.normal(t, 1.0) ; F.normalize(t, dim=0)
F.softmax(t, -1) ; F.relu(t) ; F.gelu(t) ; t.cumsum(0) ; t.sort(-1) ; t.flatten().topk(1) ; t.float().quantile(0.5)
torch.histc(t.float(), 4) ; t.unique() ; t.prod() ; t.median() ; t.std(), t.var() ; t.logsumexp(0) ; torch.cat([t, o])
torch.stack([t, o]) ; torch.cat([t.flatten(), ps[0]]) ; torch.ones(2, t.shape[0], dtype=t.dtype) @ t ; t @ o.T
t.mm(o.t()) ; torch.einsum("ij,ij->i", t, o) ; torch.outer(t, o)
F.linear(torch.ones(2, t.shape[-1], dtype=t.dtype), t) ; F.mse_loss(t, o, reduction="none") ; torch.atleast_2d(t)
t.diag() ; p.data = p.data * 2 ; p.data = p.data.clamp(-1, 1) ; p.data.zero_() ; p.data += 1 ; p.grad = p.grad * 2
p.grad /= 3 ; p.grad = torch.ones_like(p) ; p.grad = torch.ones(p.shape, dtype=p.dtype) ; p.grad = torch.zeros_like(p)
p.grad = None ; p.grad = p.grad.clone() ; p.grad.data = p.grad.data * 2 ; p.grad.data.mul_(0.5) ; p.grad.zero_()
p.grad[:2] = 0 ; del p.grad ; p.grad.add_(p, alpha=0.1) ; p.grad += 0.1 * p.detach() ; p.add_(p.grad, alpha=-0.1)
p.data -= 0.1 * p.grad.data ; p.grad.mul_((p > 0).to(p.dtype)) ; p.grad.addcmul_(p, p) ; p.grad.copy_(p)
p.data.sub_(p.grad, alpha=0.1) ; p.lerp_(p.grad, 0.1) ; kept = p.grad; p.grad = None; p.grad = kept * 0.5
p.grad = p.grad.detach() ; p.grad.requires_grad ; model.zero_grad() ; model.zero_grad(set_to_none=False)
optimizer.zero_grad() ; optimizer.zero_grad(set_to_none=False) ; torch._foreach_mul_(gs, 0.5)
torch._foreach_mul_(gs, torch.tensor(0.5)) ; torch._foreach_add_(gs, grown(ps), alpha=0.1)
torch._foreach_add(gs, full(gs)) ; torch._foreach_lerp_(full(ps), grown(ps), 0.5) ; torch._foreach_copy_(full(gs), gs)
torch._foreach_copy_(gs, full(gs)) ; torch._foreach_zero_(gs) ; torch._foreach_max(gs)
torch._foreach_div_(gs, [2.0] * len(gs)) ; torch._foreach_add_(full(ps), grown(ps))
torch._foreach_mul(grown(ps), [3.0] * len(ps)) ; torch._foreach_neg_([t, *gs])
torch._foreach_sqrt(torch._foreach_abs(gs)) ; torch._foreach_mul_([*gs, *full(gs)], 2.0)
torch._foreach_addcmul_(gs, gs, gs) ; get_ema_multi_avg_fn(0.9)(full(ps), grown(ps), 0)
get_ema_multi_avg_fn(0.9)(grown(ps), full(ps), 0) ; utils.parameters_to_vector(ps) ; utils.parameters_to_vector(gs)
utils.vector_to_parameters(utils.parameters_to_vector(ps) / 2, ps) ; torch.cat([g.flatten().float() for g in gs])
[g.clone() for g in gs] ; [g.mul_(0.5) for g in gs] ; [p.grad.numel() for p in ps] ; utils.clip_grad_value_(ps, 0.3)
utils.clip_grad_value_(ps, 0.3, foreach=True) ; utils.clip_grad_value_(ps[0], 0.1, foreach=False)
utils.clip_grads_with_norm_(ps, 1.0, torch.tensor(4.0))
utils.clip_grads_with_norm_(ps, 1.0, torch.tensor(4.0), foreach=True)
torch._amp_foreach_non_finite_check_and_unscale_(gs, torch.zeros(1), torch.full((1,), 0.5)) ; init.zeros_(t)
init.ones_(t) ; init.constant_(t, 2) ; init.uniform_(t) ; init.normal_(t, std=0.1) ; init.trunc_normal_(t)
init.eye_(t) ; init.dirac_(t) ; init.xavier_uniform_(t) ; init.xavier_normal_(t) ; init.kaiming_uniform_(t, a=5**0.5)
init.kaiming_normal_(t, mode="fan_out") ; dist.broadcast(t, 0) ; dist.all_reduce(t) ; numpy.float32(2) * t
t * numpy.float64(2) ; hash(t) == hash(t) ; t is t ; t in [t] ; torch.is_tensor(t) ; isinstance(p, nn.Parameter)
"""

ROUNDED = """
t.norm() ; t.norm().item() ; float(t.norm(1)) ; t.norm(float("inf")) ; t.norm(0) ; t.norm(3) ** 2 ; t.norm("fro")
t.mean() ; torch.linalg.norm(t) ; torch.linalg.vector_norm(t, dtype=torch.float64) ; torch.linalg.vector_norm(t, 1)
t.norm(-1) ; torch.norm(t, 2.0) ; torch.norm(t, p=2, dtype=torch.float32) ; t.square().sum().sqrt() ; t.float().norm()
t.double().sum() ; t.sum(), t.mean() ; sum(t) ; (t * o).sum() ; (t * o).sum() / (t.norm() * o.norm())
t.div_(t.norm()) ; t.nansum() ; t.nanmean() ; t.mul_(o.norm() / t.norm()) ; torch.dot(t.flatten(), o.flatten())
f"{t.norm():.2f}" ; round(float(t.norm()), 2) ; t.norm() > 0 ; torch.where(t.norm() > 0, t, o)
t * (1 / (t.norm() + 1e-6)).clamp(max=1.0) ; t.sub_(t.mean()) ; (t - t.mean()) / (t.std() + 1)
min(1.0, 0.5 / t.norm().item()) ; torch.minimum(t.norm(), torch.tensor(1.0)) ; torch.stack([t.norm(), t.norm()]).max()
F.mse_loss(t, o) ; F.cosine_similarity(t.flatten(), o.flatten(), dim=0) ; torch.dist(t, o) ; (t - o).norm()
t.norm() + o.norm() ; torch.stack([g.norm() for g in gs]) ; torch.norm(torch.stack([g.norm(2) for g in gs]), 2)
max(g.abs().max() for g in gs) ; torch.stack([g.detach().data.norm(2.0) for g in gs]).norm(2)
sum(g.norm().item() ** 2 for g in gs) ** 0.5 ; sum(g.float().pow(2).sum() for g in gs)
[g.norm().tolist() for g in gs] ; sum(p.norm() for p in ps) ; max(g.norm() for g in gs)
sum(p.square().sum() for p in ps).sqrt() ; torch.stack([g.norm() for g in gs]).mean()
torch.tensor([g.norm() for g in gs]) ; torch.cat([g.norm().reshape(1) for g in gs])
torch.stack([*[g.norm() for g in gs], torch.tensor(2.0)]).norm() ; torch._foreach_norm(gs)
torch._foreach_norm(gs, float("inf")) ; torch._foreach_norm(ps) ; torch._foreach_norm([*gs, *full(gs)])
torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gs))) ; torch._foreach_norm(gs, 1)
p.add_(p.grad * (0.05 / p.grad.norm())) ; p.sub_(p.grad * (p.norm() / (p.grad.norm() + 1)))
torch._foreach_mul_(gs, 1 / (utils.get_total_norm(gs) + 1)) ; utils.get_total_norm([*gs, *full(gs)])
utils.get_total_norm(gs[0]) ; utils.get_total_norm([g.float() for g in gs]) ; utils.clip_grad_norm_(ps[0], 0.1)
utils.clip_grad_norm_([*ps, *also], 0.1) ; utils.clip_grad_norm_([*also, *ps], 0.1, foreach=True)
utils.clip_grad_norm_(ps, 0.1).item() ; utils.clip_grad_norm_(iter(ps), 0.1, 2, True) ; utils.clip_grad_norm_(ps, 0.0)
t.fill_(o.sum())
"""
for _order, _each in itertools.product((1, 2.0, 3, math.inf), (None, True, False)):
    _how = f"{_order!r}, foreach={_each}".replace("inf", "math.inf")
    ROUNDED += f"utils.clip_grad_norm_(ps, 0.5, {_how}) ; utils.get_total_norm(gs, {_how})\n"
    ROUNDED += f"utils.clip_grad_norm_(ps, 0.5, {_how}, error_if_nonfinite=True)\n"
    ROUNDED += f"utils.clip_grads_with_norm_(ps, 0.5, utils.get_total_norm(gs, {_how}), foreach={_each})\n"

FORMS = {form: text is EXACT for text in (EXACT, ROUNDED) for form in listed(text)}
"""Each with whether all of its bits are the same; else ranks add up numbers for it."""
