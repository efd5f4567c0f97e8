# %% [markdown]
# # A first look
#
# This notebook trains a small model of text on one core of a CPU, in about a minute: first to look at the gradient
# noise scale, then with fixed batches of four sizes, then with a batch that grows. The text is real and already on your
# disk: the source code of Python's standard library. The model reads 16 bytes and predicts the next one.
#
# It needs `pip install 'divebatch[report]'`, that is, torch, numpy and matplotlib.

# %%
import os
import sysconfig
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Auto, Controller, Fixed, NoiseMeter, Policy

torch.set_num_threads(1)
SAMPLES = int(os.environ.get("SAMPLES", "120000"))  # fewer for a quick try
CONTEXT, EPOCHS = 16, 4

# %% [markdown]
# ## The data
#
# Pieces of 17 bytes from random places: 16 to read, and the one that follows.

# %%
text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, 1)
places = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
held_out, chosen = pieces[places[:10_000]].long(), pieces[places[10_000 : 10_000 + SAMPLES]].long()
dataset = TensorDataset(chosen[:, :-1], chosen[:, -1])
print(f"{len(text) / 1e6:.1f} MB of source code, {len(dataset)} samples of {CONTEXT} bytes")

# %% [markdown]
# ## The training
#
# An ordinary loop with a cosine schedule. Three lines are divebatch's: the loader, the controller, and its step after
# each epoch. With `Fixed` nothing changes. A `NoiseMeter` may look on: it reads the optimizer's gradients and changes
# nothing either.


# %%
def train(policy: Policy, batch_size: int, lr: float, readings: list[tuple[int, float, float, float]] | None = None):
    """Train from the same start; return the optimizer steps, the loss on held-out text, and each step's batch size."""
    torch.manual_seed(0)
    layers = nn.Embedding(256, 24), nn.Flatten(), nn.Linear(24 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 256)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    meter = NoiseMeter(optimizer) if readings is not None else None

    loader = AdaptiveLoader(dataset, batch_size=batch_size, seed=0, drop_last=True)  # 1
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    control = Controller(  # 2
        model, optimizer, loader, policy, scheduler=scheduler, scheduler_unit="step", every_steps=20
    )
    sizes: list[int] = []
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            sizes.append(len(y))
            if meter is not None and readings is not None and len(sizes) % 200 == 0:
                noise = meter.read(batch_size)
                readings.append((len(sizes), noise.value, noise.low, noise.high))
        control.step()  # 3
    control.close()
    with torch.no_grad():
        loss = cross_entropy(model(held_out[:, :-1]), held_out[:, -1]).item()
    return len(sizes), loss, sizes


# %% [markdown]
# ## See the noise scale
#
# The noise scale is the batch size at which the gradient is half signal and half noise. Up to about this size, a larger
# batch saves steps. It grows as the learning rate falls: the smaller the steps, the more of the signal is used up, and
# what is left is noise.

# %%
readings: list[tuple[int, float, float, float]] = []
results = {"fixed 128": train(Fixed(), 128, 2.8e-3, readings)}
figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
for step, value, below, above in readings:
    if above < float("inf"):
        axes.errorbar(step, value, [[value - below], [above - value]], color="#009E73", marker="o")
    elif below > 0:
        axes.plot(step, below, color="#009E73", marker="^", markerfacecolor="none")
axes.plot([], [], "o-", color="#009E73", label="noise scale, with its 95 % interval")
axes.plot([], [], "^", color="#009E73", markerfacecolor="none", label="at least (no upper end)")
axes.axhline(128, color="#999999", label="the batch, 128")
axes.set(xlabel="optimizer steps", ylabel="samples")
axes.set_yscale("log", base=2)
axes.yaxis.set_major_formatter("{x:g}")
axes.legend()
figure.savefig("noise_scale.png", dpi=110)

# %% [markdown]
# ## Fixed batches, as one would try them
#
# The learning rate follows the root of the batch size, as suits Adam. Of the rates 1.4, 2.8 and 4 in a thousand, 2.8
# was the best for a batch of 128.

# %%
for size in (64, 256, 512):
    results[f"fixed {size}"] = train(Fixed(), size, 2.8e-3 * (size / 128) ** 0.5)

# %% [markdown]
# ## A batch that grows
#
# `Auto` starts with a batch and a learning rate that suit each other, here 128. As the schedule lowers the learning
# rate, it lets the batch grow instead.

# %%
results["Auto from 128"] = train(Auto(max_batch_size=2048, total_samples=EPOCHS * len(dataset)), 128, 2.8e-3)
for name, (count, loss, _) in results.items():
    print(f"{name:14} {count:5} steps, held-out loss {loss:.4f}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4), layout="constrained")
sizes = results["Auto from 128"][2]
left.step(range(len(sizes)), sizes, color="#0072B2", where="post")
left.set(xlabel="optimizer steps", ylabel="batch size, Auto")
left.set_yscale("log", base=2)
left.yaxis.set_major_formatter("{x:g}")
fixed = sorted((count, loss, name) for name, (count, loss, _) in results.items() if name.startswith("fixed"))
right.plot([count for count, _, _ in fixed], [loss for _, loss, _ in fixed], color="#999999", marker="o")
for count, loss, name in fixed:
    right.annotate(name, (count, loss), textcoords="offset points", xytext=(4, 5))
count, loss, _ = results["Auto from 128"]
right.plot(count, loss, "D", color="#0072B2")
right.annotate("Auto from 128", (count, loss), textcoords="offset points", xytext=(4, -12), color="#0072B2")
right.set(xlabel="optimizer steps", ylabel="held-out loss (nats per byte)")
right.set_xscale("log", base=2)
right.xaxis.set_major_formatter("{x:g}")
right.margins(x=0.3, y=0.15)
figure.savefig("loss.png", dpi=110)

# %% [markdown]
# In the run that is stored here, `Auto` ended where the fixed batch of 128 did, with about half of its optimizer steps.
# The fixed batch of 256 took as many steps and ended higher. Half the steps are half the time where a step takes the
# same time at any of these sizes, as on a large GPU or on many devices. On a CPU core a larger batch takes longer, and
# little is won. This is one seed of one small model: the documentation says [when it pays](../docs/when-it-pays.md).
