"""The Hugging Face shell: config classes, a PreTrainedModel around the looped transformer, loading and saving.

Reading order: `config` -> `cache` -> `modeling` -> `checkpoint`, `load`, `save` -> `register`. Everything is
written against the names that transformers 5.0 and the newest 5.x share; where they differ (the cache argument
is `past_key_values` in the old, `cache` in the new), the shell takes both.
"""
