"""Tiny models and tokenizers for tests; run by the lab venv's python: ``python tests/data_models.py KIND FOLDER``.

KIND: chatml, thinking (a template that drops reasoning from earlier turns), marked ({% generation %}), slow (a
tokenizer that is Python code of the model's own and knows no offsets), none (no chat template).
"""

from __future__ import annotations

import json
import pathlib
import sys

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
SLOW = '''
import json, os
from transformers import PreTrainedTokenizer

class SlowTokenizer(PreTrainedTokenizer):
    """Bytes as tokens; like the tiktoken ones, it has no offsets."""
    vocab_files_names = {"vocab_file": "bytes.json"}

    def __init__(self, vocab_file=None, **options):
        self.names = ["<%02x>" % one for one in range(256)]
        self.ids = {name: number for number, name in enumerate(self.names)}
        super().__init__(**options)

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {**self.ids, **self.added_tokens_encoder}

    def _tokenize(self, text, **options):
        return ["<%02x>" % one for one in text.encode("utf-8")]

    def _convert_token_to_id(self, token):
        return self.ids.get(token, 0)

    def _convert_id_to_token(self, index):
        return self.names[index]

    def convert_tokens_to_string(self, tokens):
        parts = [bytes([self.ids[one]]) if one in self.ids else one.encode() for one in tokens]
        return b"".join(parts).decode("utf-8", "replace")

    def save_vocabulary(self, save_directory, filename_prefix=None):
        path = os.path.join(save_directory, "bytes.json")
        with open(path, "w") as stream:
            json.dump(self.names, stream)
        return (path,)
'''
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": 258,
}


def tokenizer(kind: str, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    template = {"chatml": CHATML, "thinking": THINKING, "marked": MARKED, "slow": THINKING, "none": None}[kind]
    if kind == "slow":
        (folder / "slow_tokenizer.py").write_text(SLOW)
        (folder / "bytes.json").write_text("[]")
        added = {
            str(256 + number): {
                "content": name,
                "special": number < 3,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "single_word": False,
            }
            for number, name in enumerate(SPECIALS)
        }
        (folder / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "tokenizer_class": "SlowTokenizer",
                    "auto_map": {"AutoTokenizer": ["slow_tokenizer.SlowTokenizer", None]},
                    "bos_token": "<|bos|>",
                    "eos_token": "<|im_end|>",
                    "added_tokens_decoder": added,
                    "chat_template": template,
                }
            )
        )
        return
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={one: number for number, one in enumerate(alphabet)}, merges=[])
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens(SPECIALS[:3])
    built.add_tokens(SPECIALS[3:])
    fast = PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<|bos|>", eos_token="<|im_end|>")
    if template:
        fast.chat_template = template
    fast.save_pretrained(str(folder))


def weights(folder: pathlib.Path, seed: int = 0) -> None:
    """Random weights for the folder's config, hot enough that tokens differ clearly."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder))).save_pretrained(str(folder))


if __name__ == "__main__":
    tokenizer(sys.argv[1], pathlib.Path(sys.argv[2]))
    if "weights" in sys.argv[3:]:
        weights(pathlib.Path(sys.argv[2]))
