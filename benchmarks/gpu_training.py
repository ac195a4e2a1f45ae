"""Sections of `gpu.py` that train or measure a whole model."""

import copy
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_kernels import device_of
from step_time import Arm
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from moq_hf import MoQConfig, MoQTrainer, block_eigenvalues, verify_quantized
from moq_hf.model.inventory import Inventory
from moq_hf.training.controller import MoQController
from moq_hf.training.measuring import measuring

if TYPE_CHECKING:
    from gpu import Report

Batch = dict[str, Tensor]


def config(
    start: int,
    target: int | None = None,
    groups: int | str = "per_channel",
    group_size: int | None = None,
    **schedule: Any,
) -> dict[str, Any]:
    """A config that begins at the first step, and stays at `start` without a target."""
    scales = {"quantize_group_size": group_size} if group_size else {"quantize_groups": groups}
    return {
        "quantize_bits": {"start_bits": start, "target_bits": target or start},
        **scales,
        # Runs are as short as they can be, and need not reach their target.
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0, "allow_unreached": True, **schedule},
    }


def bert(report: "Report", layers: int = 12, **more: Any) -> BertForSequenceClassification:
    """BERT-base with random weights, on the CPU."""
    set_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": layers}
    if report.small:
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        sizes |= {"vocab_size": 1200, "max_position_embeddings": 32}
    return BertForSequenceClassification(BertConfig(**{**sizes, **more}))


def llama(report: "Report") -> LlamaForCausalLM:
    """The shape of Llama 3.2 with 1 billion weights, random, on the device."""
    set_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    }
    if report.small:
        sizes |= {"vocab_size": 1200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    with device_of(report):
        return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))


def pairs(report: "Report", rows: int, tokens: int) -> Batch:
    """Random sentence pairs with labels."""
    rows, tokens = (2, 8) if report.small else (rows, tokens)
    ids = torch.randint(1000, 1200, (rows, tokens), device=device_of(report))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}


def texts(report: "Report") -> Batch:
    """Random text for a language model: as many tokens as fit with two copies of it."""
    ids = torch.randint(0, 1200, (2, 8) if report.small else (4, 1024), device=device_of(report))
    return {"input_ids": ids, "labels": ids}


def fits(report: "Report", what: str, gigabytes: float) -> bool:
    """Whether the device has so much memory left; it is noted where it has not."""
    free = math.inf if report.small else torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        report.figure(f"{what}: not measured, it needs {gigabytes:g} GB; free", free, "GB")
    return free >= gigabytes


def seconds_of(report: "Report", run: Any) -> float:
    """The median of three."""
    times = []
    for _ in range(1 if report.small else 3):
        wait(report)
        begin = time.perf_counter()
        run()
        wait(report)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def wait(report: "Report") -> None:
    """Until the device is through."""
    if not report.small:
        torch.cuda.synchronize()


class Scaled(MoQTrainer):
    """Whose gradients overflow at some steps. A CPU gets the gradient scaler that Accelerate does not give it."""

    overflow_at: tuple[int, ...] = (1, 6)
    factor = 1e6

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer, and a scaler."""
        super().create_accelerator_and_postprocess()
        if self.accelerator.scaler is None:
            # In float32 there is more to overflow.
            self.factor = 1e38
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            self.accelerator.native_amp = True

    def compute_loss(self, model: nn.Module, inputs: Any, **kwargs: Any) -> Any:
        """The loss, too large at some steps."""
        loss = super().compute_loss(model, inputs, **kwargs)
        return loss * self.factor if model.training and self.state.global_step in self.overflow_at else loss


class Watch(TrainerCallback):
    """Whether each optimizer step changed the weights."""

    def __init__(self) -> None:
        self.changed: list[bool] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Keep the weights."""
        self.before = [parameter.detach().clone() for parameter in model.parameters()]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Compare them."""
        now = zip(self.before, model.parameters(), strict=True)
        self.changed.append(any(not torch.equal(a, b) for a, b in now))


def rows(report: "Report", count: int) -> list[dict[str, Any]]:
    """Random text shaped as MRPC: two sentences of together at most 128 tokens, and a label."""
    generator = torch.Generator().manual_seed(1)
    length = 8 if report.small else 128
    ids = torch.randint(1000, 1200, (count, length), generator=generator)
    ends = torch.randint(length // 4, length + 1, (count,), generator=generator).tolist()
    place = torch.arange(length)
    return [
        {
            "input_ids": row * (place < end),
            "attention_mask": (place < end).long(),
            "token_type_ids": ((place >= end // 2) & (place < end)).long(),
            "labels": int(row[0] % 2),
        }
        for row, end in zip(ids, ends, strict=True)
    ]


def settings(report: "Report", folder: str, steps: int, **more: Any) -> TrainingArguments:
    """What all runs of a Trainer have."""
    fixed: dict[str, Any] = {
        "per_device_train_batch_size": 2 if report.small else 32,
        "max_steps": steps,
        "learning_rate": 5e-5,
        "logging_steps": 1000,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": report.small,
        "disable_tqdm": True,
        "dataloader_pin_memory": not report.small,
        "seed": 3,
    }
    return TrainingArguments(folder, **{**fixed, **more})


def overflow(report: "Report") -> None:
    """fp16 with gradients that overflow twice: those steps are skipped, and the schedule does not count them."""
    watch, count = Watch(), 10
    with tempfile.TemporaryDirectory() as folder:
        args = settings(report, folder, count, fp16=True)
        model = bert(report, 4)
        falling = config(8, 4, quantize_period=2)
        trainer = Scaled(model, args, train_dataset=rows(report, 64), callbacks=[watch], moq_config=falling)
        trainer.train()
    controller = trainer.moq.controller
    skipped = [step for step, changed in enumerate(watch.changed) if not changed]
    # A scale of 65,536 overflows by itself at first, as far as the model's gradients go.
    report.detail("skipped", skipped)
    report.detail("switches", [list(switch) for switch in controller.history][-8:])
    report.figure("the steps that overflow are skipped", set(trainer.overflow_at) <= set(skipped), equal=True)
    expected = count - len(skipped)
    report.figure(f"steps that the schedule counts, of {count}", controller.schedule.steps, equal=expected)
    report.figure("the loss scale at the end", trainer.accelerator.scaler.get_scale())
    report.figure("all weights are finite", all(bool(p.isfinite().all()) for p in model.parameters()), equal=True)


def compiled(report: "Report") -> None:
    """Bits drop in a compiled model: nothing is compiled anew, and the numbers are those of the uncompiled one."""
    from torch._dynamo.utils import counters

    model = bert(report, 2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).to(device_of(report))
    falling = MoQConfig.from_dict(config(8, 4, quantize_period=2))
    arms = [Arm(model, falling, backend=backend) for backend in (None, "aot_eager" if report.small else "inductor")]
    batches = [pairs(report, 16, 128)]
    for arm in arms * 2:
        arm.step(batches)
    graphs, drops = counters["stats"]["unique_graphs"], len(arms[1].controller.history)
    for arm in arms * 8:
        arm.step(batches)
    report.detail("bits", sorted(set(arms[1].controller.schedule.bits.values())))
    report.figure("graphs compiled in the first two steps", graphs, at_least=1)
    report.figure("switches of bits afterwards", len(arms[1].controller.history) - drops, at_least=1)
    report.figure("graphs compiled afterwards", counters["stats"]["unique_graphs"] - graphs, equal=0)
    losses = [float(run(**batches[0]).loss) for run in (arms[1].forward, arms[1].model)]
    apart = abs(losses[0] - losses[1]) / abs(losses[1])
    report.figure("loss: relative difference of compiled from not, with the same weights", apart, at_most=1e-3)
    with torch.no_grad():
        plain, other = (arm.model.eval()(**batches[0]).logits.float() for arm in arms)
    report.figure(
        "logits: relative difference of the run from one that is not compiled",
        float((plain - other).norm() / plain.norm()),
        at_most=0.01,
    )


def resume(report: "Report") -> None:
    """A run as long as an epoch of MRPC on random text, and the same one from a checkpoint in the middle."""
    # Where PyTorch has no such algorithm it warns.
    torch.use_deterministic_algorithms(True, warn_only=True)
    count, step = (6, 3) if report.small else (115, 58)
    ends: dict[str, list[Tensor]] = {}
    equal = False
    with tempfile.TemporaryDirectory() as folder:
        for name in ("whole", "resumed", "whole again"):
            # Where the resumed one is equal, so is one that is repeated.
            if name == "whole again" and equal:
                break
            save = {"save_strategy": "steps", "save_steps": step} if name == "whole" else {}
            args = settings(report, f"{folder}/{name}", count, bf16=True, **save)
            model = bert(report, attn_implementation="eager")
            if name == "resumed":
                # Everything must come from the checkpoint.
                model.apply(lambda module: module.weight.data.zero_() if isinstance(module, nn.Linear) else None)
            trainer = MoQTrainer(
                model, args, train_dataset=rows(report, 3668), moq_config=config(8, 4, quantize_period=step // 3)
            )
            begin = time.perf_counter()
            trainer.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-{step}" if name == "resumed" else None)
            report.figure(f"{name}: seconds", time.perf_counter() - begin, "s", timed=True)
            report.detail(f"{name}: switches", [list(each) for each in trainer.moq.controller.history][-4:])
            ends[name] = [parameter.detach().cpu().clone() for parameter in model.parameters()]
            if name != "whole":
                equal = all(map(torch.equal, ends["whole"], ends[name]))
                report.figure(f"{name}: weights bit-equal to those of the whole run", equal, equal=True)


def one_rank(report: "Report") -> None:
    """NCCL with one process: FSDP2 on a mesh of one trains as the unsharded model, and packed codes come through."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Where a gradient is nothing but rounding, as that of a key's bias, AdamW makes whole steps of a difference.
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = device_of(report)
    with tempfile.TemporaryDirectory() as folder:
        where = {"init_method": f"file://{folder}/rendezvous", "rank": 0, "world_size": 1}
        dist.init_process_group("gloo" if report.small else "nccl", **where)
        try:
            ends = {}
            for way in ("unsharded", "sharded"):
                model = bert(report, 4).to(device).eval()
                document = config(8, 4, quantize_period=2)
                if way != "unsharded":
                    mesh = init_device_mesh(device.type, (1,))
                    for block in model.bert.encoder.layer:
                        fully_shard(block, mesh=mesh)
                    fully_shard(model, mesh=mesh)
                ends[way] = sharded_run(report, model, document)
                if way != "unsharded":
                    apart = max(float((a - b).abs().max()) for a, b in zip(ends["unsharded"], ends[way], strict=True))
                    report.figure("FSDP2: largest difference of a weight from unsharded", apart, at_most=1e-5)
        finally:
            dist.destroy_process_group()


def sharded_run(report: "Report", model: Any, document: dict[str, Any]) -> list[Tensor]:
    """The weights after some steps."""
    controller = MoQController(model, MoQConfig.from_dict(document), 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(6):
        torch.manual_seed(step)
        model(**pairs(report, 8, 64)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
    whole = [getattr(parameter, "full_tensor", lambda p=parameter: p)() for parameter in model.parameters()]
    return [each.detach().clone() for each in whole]


def eigenvalues(report: "Report") -> None:
    """Those of a small model on the device and on the CPU, and the time of a product with BERT-base."""
    small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 1200}
    model = bert(report, 2, **small)
    batch = pairs(report, 8, 16)
    found = {}
    for device in (torch.device("cpu"), device_of(report)):
        inputs = {name: value.to(device) for name, value in batch.items()}
        found[device.type, len(found)] = measured(copy.deepcopy(model).to(device), inputs, 60)
    here, there = ([each.value for each in values.values()] for values in found.values())
    report.detail("values", [here, there])
    apart = max(abs(a - b) / max(map(abs, here)) for a, b in zip(here, there, strict=True))
    report.figure("largest difference from the CPU, of the largest eigenvalue", apart, at_most=0.02)
    if report.small:
        return
    model, batch = bert(report).to(device_of(report)), pairs(report, 16, 64)
    begin = time.perf_counter()
    values = measured(model, batch, 5)
    wait(report)
    seconds = time.perf_counter() - begin
    products = sum(each.num_products for each in values.values())
    report.figure("BERT-base, 16 x 64: milliseconds a product of a block", 1000 * seconds / products, "ms", timed=True)


def measured(model: Any, inputs: Batch, most: int) -> dict[str, Any]:
    """The eigenvalue of each block, with at most so many products."""
    with measuring(model, Inventory.of(model).layer_blocks()) as blocks:
        return block_eigenvalues(lambda: model(**inputs).loss, blocks, max_iter=most)


def delivery(report: "Report") -> None:
    """What a run delivers is what was evaluated."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        # At this length every layer has arrived.
        trainer = MoQTrainer(
            bert(report, 4), settings(report, str(out), 6), train_dataset=rows(report, 64), moq_config=config(4)
        )
        trainer.train()
        trainer.save_model(str(out))
        model = trainer.model.eval()
        batch = pairs(report, 8, 64)
        layers = verify_quantized(out, model, inputs=batch)
        report.detail("verified", str(layers)[:500])
        report.figure("delivered = evaluated", True, equal=True)
