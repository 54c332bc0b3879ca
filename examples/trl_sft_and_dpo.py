"""Fine-tune a tiny GPT-2 on conversations, then on preferences between answers, by TRL's trainers,
privately: a record is a conversation, then a pair of answers. Both runs are on one ledger.
"""

import copy
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, SFTConfig

import dpoptim
from dpoptim.integrations.trl import PrivateDPOTrainer, PrivateSFTTrainer

COLOURS = {"sky": "blue", "grass": "green", "snow": "white", "blood": "red"}
WORDS = ["[pad]", "[end]", "[user]", "[assistant]", "what", "colour", "is", "it", *COLOURS]
RECORDS, PUBLIC = 800, 100


def tokenizer() -> PreTrainedTokenizerFast:
    words = [*WORDS, *COLOURS.values()]
    known = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[pad]"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=known, pad_token="[pad]", eos_token="[end]")
    found.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% else %}[end]{% endif %}"
    )
    return found


def question_and_answers(index: int) -> tuple[list[Any], list[Any], list[Any]]:
    """A made-up question of one of several lengths, its answer, and a wrong one."""
    names, colours = list(COLOURS), list(COLOURS.values())
    right, wrong = index % 4, (index + 1 + index // 4 % 3) % 4
    question = "what colour is " + "it " * (index // 12 % 4) + names[right]
    asked = [{"role": "user", "content": question}]
    good, bad = ([{"role": "assistant", "content": colours[i]}] for i in (right, wrong))
    return asked, good, bad


def main() -> float:
    torch.manual_seed(0)
    made = [question_and_answers(i) for i in range(RECORDS + PUBLIC)]
    conversations = Dataset.from_list([{"prompt": q, "completion": good} for q, good, _ in made])
    pairs = Dataset.from_list([{"prompt": q, "chosen": g, "rejected": b} for q, g, b in made])
    words, ledger = tokenizer(), dpoptim.Ledger(dataset="conversations", epsilon=8.0, delta=1e-4)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(words), n_positions=32, n_embd=32, n_layer=1, n_head=2,
            bos_token_id=1, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip
    options = {
        "per_device_train_batch_size": 64, "learning_rate": 3e-2, "logging_steps": 10,
        "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    method = dpoptim.DPSGD(clip_norm=1.0)
    with tempfile.TemporaryDirectory() as folder:
        plan = method.plan(n=RECORDS, batch_size=200, epochs=8, epsilon=4.0, delta=1e-5)
        PrivateSFTTrainer(
            model,
            SFTConfig(output_dir=folder, **options),
            train_dataset=conversations.select(range(RECORDS)),
            processing_class=words,
            plan=plan,
            ledger=ledger,
            ledger_label="conversations",
        ).train()
        plan = method.plan(n=RECORDS, batch_size=200, epochs=4, epsilon=3.0, delta=1e-5)
        trainer = PrivateDPOTrainer(
            model,
            copy.deepcopy(model),  # the reference: released
            DPOConfig(output_dir=folder, **options),
            train_dataset=pairs.select(range(RECORDS)),
            eval_dataset=pairs.select(range(RECORDS, RECORDS + PUBLIC)),  # public records
            processing_class=words,
            plan=plan,
            ledger=ledger,
            ledger_label="preferences",
        )
        trainer.train()
        trainer.evaluate()
        right = float(trainer.state.log_history[-1]["eval_rewards/accuracies"])
    print(f"{right:.0%} of public answers ranked as they should be, with {ledger.spent()}")
    return right


if __name__ == "__main__":
    main()
