"""Train LoRA adapters on Megatron-Core, and load them with Hugging Face's peft.

It runs on one rank; start it with torchrun, and a Layout of that size, for more.
"""

import tempfile
from pathlib import Path

import torch
from peft import PeftModel
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_megatron_peft import Layout, LoraConfig
from rl_megatron_peft.backend.parallel import close_ranks, open_ranks
from rl_megatron_peft.backend.policy import MegatronPolicyBackend
from rl_protocol import BatchData, ragged

PROMPT, RESPONSE = [2, 3, 4], [5, 6]
SIZES = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def loss(log_prob, entropy, micro, counts):
    """REINFORCE: this micro-batch's share of the mini-batch's loss, and metrics."""
    advantages = torch.tensor(micro.ragged("advantages").values)
    return -(advantages * log_prob).sum() / counts.tokens, {}


def log_probs(model):
    """Of the response, by transformers."""
    logits = model(torch.tensor([PROMPT + RESPONSE])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1)[range(len(RESPONSE)), RESPONSE].detach()


def main():
    folder = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS)).save_pretrained(folder / "base")  # yours is a real one

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    policy = MegatronPolicyBackend(
        folder / "base", lora=LoraConfig(rank=8), loss=loss, ranks=open_ranks(Layout(tensor=1, pipeline=1))
    )
    columns = {"prompts": [PROMPT], "responses": [RESPONSE]}
    batch = BatchData(
        {name: ragged(rows, "int64") for name, rows in columns.items()}
        | {"response_mask": ragged([[True, True]], "bool"), "advantages": ragged([[1.0, 1.0]], "float32")}
    )
    for _ in range(3):
        policy.update(batch, temperature=1.0)
    trained = policy.compute_log_probs(batch, temperature=1.0).ragged("log_probs").values
    policy.save_pretrained(folder / "adapter")

    base = Qwen3ForCausalLM.from_pretrained(folder / "base")
    print("base:    ", log_probs(base).tolist())
    print("Megatron:", trained.tolist())
    peft = PeftModel.from_pretrained(base, folder / "adapter")
    print("peft:    ", log_probs(peft).tolist())
    torch.testing.assert_close(log_probs(peft), torch.tensor(trained), rtol=1e-4, atol=1e-4)
    close_ranks()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
