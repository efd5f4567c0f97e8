# %% [markdown]
# # A first look
#
# This notebook trains a small model of text twice, on one core of a CPU, in about a minute: once with a fixed batch
# size, once with the batch size that its gradients ask for. The text is real and already on your disk: the source code
# of Python's standard library. The model reads 16 bytes and says which byte comes next.
#
# It needs `pip install 'divebatch[report]'`, that is, torch, numpy and matplotlib.

# %%
import os
import sysconfig
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Auto, Controller, Fixed, Policy

torch.set_num_threads(1)
SAMPLES = int(os.environ.get("SAMPLES", "120000"))  # fewer for a quick try
CONTEXT, EPOCHS, BATCH = 16, 4, 32

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
# An ordinary loop. Three lines are divebatch's: the loader, the controller, and its step after each epoch. With `Fixed`
# nothing changes and nothing is measured; with `Auto` the batch size follows the gradient noise scale, and the learning
# rate follows the batch size.


# %%
def train(policy: Policy) -> dict[str, list[float]]:
    """Train from the same start and return what each epoch showed."""
    torch.manual_seed(0)
    layers = nn.Embedding(256, 24), nn.Flatten(), nn.Linear(24 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 256)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.4e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)

    loader = AdaptiveLoader(dataset, batch_size=BATCH, seed=0)  # 1
    control = Controller(model, optimizer, loader, policy, scheduler=scheduler)  # 2
    names = "batch", "noise", "low", "high", "loss", "steps", "seconds"
    curve: dict[str, list[float]] = {name: [] for name in names}
    seconds = 0.0
    for _ in range(EPOCHS):
        start = time.process_time()
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step()
        record = control.step()  # 3
        seconds += time.process_time() - start
        with torch.no_grad():
            loss = cross_entropy(model(held_out[:, :-1]), held_out[:, -1]).item()
        print(f"{record}; held-out loss {loss:.4f}")
        noise = record.noise_scale, record.noise_scale_low, record.noise_scale_high
        row = (record.batch_size, *noise, loss, record.steps, seconds)
        for name, value in zip(names, row, strict=True):
            curve[name].append(float("nan") if value is None else value)
    control.close()
    return curve


# %%
fixed = train(Fixed())

# %%
auto = train(Auto(max_batch_size=2048))

# %% [markdown]
# ## What the gradients asked for
#
# The noise scale is the batch size at which the gradient is half signal and half noise. It grows during training, and
# `Auto` takes the geometric mean of it and the batch it started with, in doublings. The band is the 95 % interval, and
# is left out where that has no upper end.

# %%
epochs = range(1, EPOCHS + 1)
figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
axes.plot(epochs, auto["noise"], color="#009E73", marker="o", label="noise scale")
axes.fill_between(epochs, auto["low"], auto["high"], color="#009E73", alpha=0.2)
axes.step(epochs, auto["batch"], where="mid", color="#0072B2", label="batch size, Auto")
axes.step(epochs, fixed["batch"], where="mid", color="#999999", label="batch size, fixed")
axes.set(xlabel="epoch", ylabel="samples", xticks=epochs)
axes.set_yscale("log", base=2)
axes.yaxis.set_major_formatter("{x:g}")
axes.legend()
figure.savefig("noise_scale.png", dpi=110)

# %% [markdown]
# ## What it saved

# %%
figure, panels = plt.subplots(1, 2, figsize=(8.6, 3.4), layout="constrained", sharey=True)
for panel, unit in zip(panels, ("seconds", "steps"), strict=True):
    panel.plot(fixed[unit], fixed["loss"], color="#999999", marker="o", label=f"fixed, {BATCH}")
    panel.plot(auto[unit], auto["loss"], color="#0072B2", marker="o", label=f"Auto from {BATCH}")
panels[0].set(xlabel="seconds of processor time", ylabel="held-out loss (nats per byte)")
panels[1].set(xlabel="optimizer steps")
panels[0].legend()
figure.savefig("loss.png", dpi=110)

for name, curve in (("fixed", fixed), ("Auto", auto)):
    print(f"{name}: loss {curve['loss'][-1]:.3f} after {curve['steps'][-1]} steps, {curve['seconds'][-1]:.0f} s")

# %% [markdown]
# In the run that is stored here, the fixed batch made three times the steps in the same epochs and ended a little
# lower; at equal time `Auto` was a little ahead. A batch of 32 was never tuned for this model, and a larger fixed one
# would be faster too: what `Auto` saves is finding it. Against a batch that somebody has tuned it saves little on one
# device. The documentation says [when it pays](../docs/when-it-pays.md).
