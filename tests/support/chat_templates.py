"""Chat templates in the shapes of five published ones, and a tokenizer with their control tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as FromBytes
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByByte
from tokenizers.processors import ByteLevel, TemplateProcessing
from tokenizers.processors import Sequence as InTurn
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "<start_of_turn>{{ role }}\n{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n"
    "{% if loop.last and add_generation_prompt %}<|assistant|>\n{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "zephyr": ZEPHYR}
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>", "zephyr": "</s>"}
"""The token that ends an answer in each."""
MARKED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with marks around answers."""
CONTROL = (
    *("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"),
)
TEXTS = (
    "what is the dose of aspirin?",
    "the dose is 100 mg a day.",
    "user assistant system model",
    "thank you, doctor",
)


def chat_tokenizer(folder: Path, template: str | None, *, texts: Sequence[str] = TEXTS, **settings: object) -> Path:
    """Writes the start token before each text. Of the control tokens, `<end_of_turn>` is not special, as in Gemma."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByByte(add_prefix_space=False)
    tokenizer.decoder = FromBytes()
    trainer = BpeTrainer(
        vocab_size=340, show_progress=False, special_tokens=["<s>"], initial_alphabet=ByByte.alphabet()
    )
    tokenizer.train_from_iterator(texts * 4, trainer)
    tokenizer.add_tokens([AddedToken(token, special=token != "<end_of_turn>", normalized=False) for token in CONTROL])
    start = tokenizer.token_to_id("<s>")
    before = TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", start)])
    tokenizer.post_processor = InTurn([ByteLevel(trim_offsets=True), before])
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **settings}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **names).save_pretrained(folder)
    return folder
