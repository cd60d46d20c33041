"""Inference engines behind one protocol: `llama`, `openai` and `vllm` speak HTTP, `sim` computes its tokens itself.

`factory.make_engine` builds one from a name and `key=value` options; `base.Engine` says what each guarantees.
"""

__all__ = ["base", "factory", "http", "llama", "openai", "sim", "vllm"]
