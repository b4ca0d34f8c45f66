"""Three offices fine-tune a language model with LoRA, and share no text: `python -m tessera.examples.llm`."""
