"""Fine-tune low-rank adapters of a GPT-2 of which each of two processes holds half. Run it by
itself, or with torchrun --nproc-per-node N.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import dpoptim

VOCABULARY, LENGTH = 32, 12


def sentences(records: int) -> Tensor:
    """Made-up sentences that count up from a random token: (records, LENGTH)."""
    starts = torch.randint(0, VOCABULARY, (records, 1))
    return (starts + torch.arange(LENGTH)) % VOCABULARY


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Mean loss a token of each record, (B,)."""
    (tokens,) = batch
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def sharded_model() -> nn.Module:
    """The base is frozen; each block, and then the rest, is spread over the processes."""
    size = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(
        vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, use_cache=False, **size
    )
    adapters = LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model = get_peft_model(GPT2LMHeadModel(config), adapters)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # "cuda" on GPUs
    for block in model.base_model.model.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)  # the same first weights and made-up data on every rank
    model = sharded_model()
    # after fully_shard, which puts other parameters in place of the model's
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    plan = dpoptim.DPSGD(clip_norm=0.5).plan(
        n=1_000, batch_size=100, steps=20, epsilon=4.0, delta=1e-5
    )
    data = TensorDataset(sentences(1_000))
    with dpoptim.attach(plan, model, optimizer, data, loss=loss) as private:
        for step in private.steps(physical_batch_size=64):
            for batch in step:
                private.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        here = sum(p.to_local().numel() for p in model.parameters())
        whole = sum(p.numel() for p in model.parameters())
        spent = private.spent()
    with torch.no_grad():
        public = loss(model, [sentences(50)]).mean().item()  # all ranks take part in the pass
    if dist.get_rank() == 0:
        print(f"rank 0 holds {here / whole:.0%} of the model; one charge: {spent}")
        print(f"loss a token on public sentences: {public:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run([*command, "--nproc-per-node", "2", __file__], check=True)
