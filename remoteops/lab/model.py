"""Makes the embedded host's tiny models. This file is sent to the host and run there, inside the host's venv.

``python model.py CONVERSATIONS FOLDER`` writes FOLDER/llama and FOLDER/qwen3: 8 layers, hidden size 64, float32, seeded
random weights, a byte-level BPE tokenizer trained on the conversations, and a ChatML chat template. The weights are
scaled so that hidden states differ clearly between tokens and stay well conditioned: a wrong row shows, and rounding
to float32 does not.
"""

from __future__ import annotations

import json
import os
import shutil
import sys

VOCABULARY = 2048
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def texts(path: str) -> "list[str]":
    """Every message of a JSONL file of conversations."""
    found = []
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            if line.strip():
                found += [str(message["content"]) for message in json.loads(line)["messages"]]
    return found


def make_tokenizer(path: str) -> object:
    """A real subword tokenizer: small vocabulary, any byte can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts(path), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token=None,
        unk_token=None,
        additional_special_tokens=SPECIAL[1:2],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(kind: str) -> object:
    """A seeded random model of that architecture, float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        "pad_token_id": 0,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape)) if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**shape))
    generator = torch.Generator().manual_seed(20240501)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() == 1:
                weight.copy_(1.0 + 0.1 * torch.randn(weight.shape, generator=generator))
            else:
                spread = 1.0 if "embed_tokens" in name else 1.3 / weight.shape[1] ** 0.5
                weight.copy_(spread * torch.randn(weight.shape, generator=generator))
    return model.float()


def main(conversations: str, folder: str) -> None:
    tokenizer = make_tokenizer(conversations)
    for kind in ("llama", "qwen3"):
        target = os.path.join(folder, kind)
        fresh = target + ".new"
        shutil.rmtree(fresh, ignore_errors=True)
        make_model(kind).save_pretrained(fresh)  # type: ignore[attr-defined]
        tokenizer.save_pretrained(fresh)  # type: ignore[attr-defined]
        shutil.rmtree(target, ignore_errors=True)
        os.rename(fresh, target)
        sys.stdout.write("made %s\n" % target)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
