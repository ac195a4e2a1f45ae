"""Trains tiny models in one process or in many: `torchrun --nproc-per-node 2 launched.py OUT KIND/CASE...`.

KIND is ddp, fsdp2 (by the Trainer's own arguments), stock (the same without MoQTrainer), loaded (that without a
callback: the model is loaded with a MoQConfig), hand (a loop of one's own around `fully_shard`), offload (the same with
parts that are kept on the CPU), hsdp (in half as many parts, twice), reshard (a forward pass leaves parts of another
size), zero1, zero2 or zero3; ddp comes first, since Accelerate keeps what it was told. Rank 0 writes
OUT/KIND-CASE.pt: the float weights, the bits, every switch and the losses; for KIND/resume/CASE if a resumed run is
equal, for KIND/error/CASE what each rank raised, for KIND/saved/CASE how it compares with stock. One launch serves many
cases: starting takes most of the time.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers as hf
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from tiny_runs import Stop, rows
from torch import nn

from moq_hf import MoQCallback, MoQConfig, MoQError, MoQTrainer
from moq_hf.model.convert import quant_layers
from moq_hf.processes import gathered_state_dict
from moq_hf.training.controller import MoQController

STEPS, GLOBAL_BATCH = 14, 8
BY_HAND = ("hand", "offload", "hsdp", "reshard")
BASE: dict[str, Any] = {
    "quantize_bits": {"start_bits": 6, "target_bits": 3},
    # Of 18 and of 33 rows: two processes hold 9 and 9, 17 and 16 of them, so groups lie across the border.
    "quantize_groups": 3,
    "quantize_schedule": {"quantize_period": 2, "schedule_offset": 2, "allow_unreached": True},
    "quantize_algo": {"scale_refresh": 3, "range": "narrow"},
}
AT_ONCE = {**BASE, "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0}}
STOCHASTIC = {**BASE, "quantize_algo": {"scale_refresh": 3, "range": "narrow", "rounding": "stochastic"}}
EIGENVALUE = {"enabled": True, "layer_name": "bert.encoder.layer", "num_samples": GLOBAL_BATCH, "max_overhead": 1.0}
BUDGET = {
    **BASE,
    # So many choices that its share of the time allows all rows, in one process and in two.
    "quantize_bits": {"start_bits": 2, "target_bits": {"mean": 3.5, "choices": [2, 8]}},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 2},
    "eigenvalue": {"num_samples": GLOBAL_BATCH, "max_overhead": 1.0},
}
# Name to MoQ config and training arguments.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nearest": (BASE, {}),
    "stochastic": (STOCHASTIC, {}),
    "ternary": ({**BASE, "quantize_bits": {"start_bits": 4, "target_bits": 2}}, {}),
    # Rounded in the last step alone: sums in another order may round to another code.
    "constant": ({"bits": 3, "groups": 3, "scale_refresh": 3, "rounding": "stochastic"}, {}),
    "activations": ({**BASE, "activation_quantization": {"enabled": True, "start_step": STEPS - 1}}, {}),
    "adamw_stochastic": (STOCHASTIC, {"optim": "adamw_torch_fused", "learning_rate": 2e-3}),
    "sharded": (
        {**BASE, "quantize_embeddings": 8},
        {"state_dict_type": "SHARDED_STATE_DICT", "save_strategy": "steps", "save_steps": STEPS},
    ),
    "float_first": (AT_ONCE, {"float_first": True}),
    "float_first_adamw": (AT_ONCE, {"float_first": True, "optim": "adamw_torch_fused", "learning_rate": 2e-3}),
    "gptq": ({**BASE, "quantize_algo": {"scale_refresh": 3, "gptq": 16}}, {}),
    "budget": (BUDGET, {}),
    "lora": ({**BASE, "lora": "merged"}, {}),
    "scales": ({"bits": 3, "groups": 3, "train": "scales"}, {}),
    "dora": ({**BASE, "lora": "merged"}, {}),
    "eigenvalues_stochastic": ({**STOCHASTIC, "eigenvalue": EIGENVALUE}, {}),
}


class OnCpu(hf.Trainer):
    """Accelerate obeys `fsdp` on GPUs only. This makes it take gloo's processes for such."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and self.accelerator.device.type == "cpu":
            state = self.accelerator.state
            PartialState._shared_state["distributed_type"] = state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True


class MoQOnCpu(OnCpu, MoQTrainer):
    """The same for MoQTrainer."""


def new_model() -> hf.BertForSequenceClassification:
    hf.set_seed(7)
    config = hf.BertConfig(
        vocab_size=60,
        hidden_size=18,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=33,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = hf.BertForSequenceClassification(config)
    with torch.no_grad():
        # Blocks of clearly different curvature.
        for index, scale in enumerate((3.0, 1.5, 0.5)):
            model.bert.encoder.layer[index].output.dense.weight.mul_(scale)
            model.bert.encoder.layer[index].intermediate.dense.weight.mul_(2 * scale)
    return model


def adapted(model: nn.Module, use_dora: bool) -> Any:
    """The model with LoRA, and a dense layer that is trained as a whole."""
    lora = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["query", "dense"], exclude_modules=["pooler.dense"],
        modules_to_save=["pooler", "classifier"], use_dora=use_dora, init_lora_weights=False,
    )  # fmt: skip
    return peft.get_peft_model(model, lora)


def trainer_for(folder: Path, kind: str, case: str, callbacks: Any = (), **more: Any) -> OnCpu:
    """A Trainer that takes the same global batch in any number of processes."""
    config, settings = CASES[case]
    world = int(os.environ.get("WORLD_SIZE", 1))
    settings = {"per_device_train_batch_size": GLOBAL_BATCH, "optim": "sgd", "learning_rate": 0.05, **settings, **more}
    settings["per_device_train_batch_size"] //= world
    float_first = settings.pop("float_first", None)
    saved_as = settings.pop("state_dict_type", "FULL_STATE_DICT")
    if kind in ("fsdp2", "stock", "loaded"):
        settings["fsdp"] = True
        settings["fsdp_config"] = {"transformer_layer_cls_to_wrap": ["BertLayer"], "state_dict_type": saved_as}
    if kind.startswith("zero"):
        settings["deepspeed"] = {
            "zero_optimization": {"stage": int(kind[-1])},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
    arguments = hf.TrainingArguments(
        str(folder), max_steps=STEPS, logging_steps=1, save_strategy=settings.pop("save_strategy", "no"),
        report_to="none", use_cpu=True, disable_tqdm=True, seed=3, **settings,
    )  # fmt: skip
    model = new_model()
    if case.startswith(("lora", "dora")):
        model = adapted(model, case.startswith("dora"))
    if kind == "loaded":
        model.save_pretrained(folder / "base")
        dist.barrier()
        with_config = {"quantization_config": MoQConfig(**config)}
        model = hf.BertForSequenceClassification.from_pretrained(folder / "base", **with_config)
    if kind in ("stock", "loaded"):
        model.accepts_loss_kwargs = False
        own = [MoQCallback(config)] if kind == "stock" else []
        return OnCpu(model, arguments, train_dataset=rows(), callbacks=[*own, *callbacks])
    more = {"moq_config": config, "float_first": float_first, "callbacks": list(callbacks)}
    return MoQOnCpu(model, arguments, train_dataset=rows(), **more)


def by_hand(folder: Path, kind: str, case: str) -> dict[str, Any]:
    """A loop without a Trainer; in many processes every layer's shards by `fully_shard`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model, config = new_model(), CASES[case][0]
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world > 1:
        # Of weights that are kept on the CPU floats are gathered.
        how: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if kind == "offload" else {}
        if kind == "hsdp":
            how["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        if kind == "reshard":
            # A forward pass leaves halves behind, of which the backward pass gathers.
            how["reshard_after_forward"] = world // 2
        for block in model.bert.encoder.layer:
            fully_shard(block.attention.self.query, **how)
            fully_shard(block, **how)
        fully_shard(model, **how)
    controller = MoQController(model, MoQConfig.load(config), STEPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data, losses = rows(), []
    for step in range(STEPS):
        batch = [data[(GLOBAL_BATCH * step + i) % len(data)] for i in range(rank, GLOBAL_BATCH, world)]
        inputs = {"input_ids": torch.stack([r["input_ids"] for r in batch])}
        loss = model.train()(**inputs, labels=torch.tensor([r["labels"] for r in batch])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.check_ranks()
        controller.step()
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        losses.append(float(mean))
    return {"model": model, "controller": controller, "losses": losses}


def outcome(made: dict[str, Any]) -> dict[str, Any]:
    """What two runs are compared by."""
    model, controller = made["model"], made["controller"]
    with gathered_state_dict(model, everywhere=True) as gathered:
        floats = gathered or {name: value.detach().clone() for name, value in model.state_dict().items()}
    layers = quant_layers(model)
    return {
        "weights": floats,
        "bits": {name: layer.moq.bits for name, layer in layers.items()},
        "quantized": {name: layer.quantized_copy(torch.float32) for name, layer in layers.items()},
        "history": None if controller is None else json.loads(json.dumps(controller.history)),
        "losses": made["losses"],
        "ranges": None if controller is None else controller.state_dict()["input_ranges"],
    }


def same_weights(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two outcomes have the same float weights, bit for bit."""
    return all(torch.equal(found["weights"][name], value) for name, value in expected["weights"].items())


def controller_of(trainer: hf.Trainer) -> MoQController | None:
    """That of the callback in the Trainer."""
    found = [c.controller for c in trainer.callback_handler.callbacks if isinstance(c, MoQCallback)]
    return found[0] if found else None


def run(folder: Path, kind: str, case: str) -> dict[str, Any]:
    """One case from beginning to end."""
    if kind in BY_HAND:
        return outcome(by_hand(folder, kind, case))
    trainer = trainer_for(folder / f"{kind}-{case}", kind, case)
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    controller = controller_of(trainer)
    found = outcome({"model": model, "controller": controller, "losses": losses})
    if case in ("nearest", "sharded", "dora") and kind != "stock":
        trainer.save_model(str(folder / f"{kind}-{case}" / "packed"))
    return found


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5}


def resumed(folder: Path, kind: str, case: str) -> bool:
    """Whether a run that was stopped and resumed ends with the weights of one that was not, bit for bit."""
    # After the last change of bits, or before it.
    stop = Stop(12 if case == "float_first_adamw" else 7)
    part, whole = (folder / f"{kind}-{name}-{case}" for name in ("part", "whole"))
    trainer_for(part, kind, case, [stop], **SAVING).train()
    ends = []
    for place, resumes in ((whole, False), (part, True)):
        trainer = trainer_for(place, kind, case, **SAVING)
        trainer.train(resume_from_checkpoint=resumes)
        ends.append(outcome({"model": trainer.model, "controller": controller_of(trainer), "losses": []}))
    expected, found = ends
    same = all(found[key] == expected[key] for key in ("bits", "history"))
    return same and same_weights(found, expected)


def saved(folder: Path, kind: str, case: str) -> dict[str, Any]:
    """Whether a run ends as one with a callback does, and what each rank hears of saving by oneself."""
    expected = run(folder, "stock", case)
    trainer = trainer_for(folder / f"{kind}-{case}", kind, case)
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    found = outcome({"model": model, "controller": None, "losses": []})
    trainer.save_model(str(folder / f"{kind}-{case}" / "packed"))
    messages: list[str | None] = [None] * dist.get_world_size()
    try:
        model.save_pretrained(folder / f"{kind}-{case}" / "own")
        own = "saved"
    except MoQError as error:
        own = str(error)
    dist.all_gather_object(messages, own)
    return {"equal": same_weights(found, expected), "messages": messages}


class Break(hf.TrainerCallback):
    """Makes rank 1 differ from rank 0 after five steps."""

    trainer: OnCpu

    def __init__(self, how: str) -> None:
        self.how = how

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if state.global_step != 5 or dist.get_rank() != 1:
            return
        if self.how == "bits":
            schedule = controller_of(self.trainer).schedule
            schedule.bits[next(iter(schedule.bits))] -= 1
        if self.how == "skipped":
            optimizer._is_overflow = True


def refused(folder: Path, kind: str, case: str) -> list[str | None]:
    """What each rank raises where ranks differ (config, bits, skipped), or for a CASE that cannot be."""
    how = Break(case)
    name = "nearest"
    if case == "config":
        name = ("nearest", "ternary")[dist.get_rank()]
    elif case in CASES:
        name = case
    how.trainer = trainer_for(folder / f"{kind}-{case}", kind, name, [how])
    messages: list[str | None] = [None] * dist.get_world_size()
    try:
        how.trainer.train()
        own = f"trained to step {how.trainer.state.global_step}"
    except MoQError as error:
        own = f"step {how.trainer.state.global_step}: {error}"
    dist.all_gather_object(messages, own)
    return messages


def main() -> None:
    """Run the cases that the command line names."""
    torch.set_num_threads(1)
    PartialState(cpu=True)
    folder = Path(sys.argv[1])
    for argument in sys.argv[2:]:
        kind, *modes, case = argument.split("/")
        modes_of = {"resume": resumed, "error": refused, "saved": saved}
        what = modes_of[modes[0]] if modes else run
        found = what(folder, kind, case)
        if dist.get_rank() == 0:
            torch.save(found, folder / f"{argument.replace('/', '-')}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
