"""Text in, rows of token ids out: what a run reads, and how it is cut.

Importing it loads neither transformers nor datasets; they are imported where they are used.

Reading order. Texts: `documents` (a named text; train and held-out), `text_files` (plain files and jsonl),
`stdlib_text` (the offline default corpus). Tokens: `tokenizer`, `chat` (conversations, and which of their tokens are
predicted), `packing` (a stream of tokens cut as a ring), `whole_packing` (documents kept whole),
`evaluation_windows` (held-out batches, for bits per byte by document).

From the data section of a recipe to rows: `recipe` -> `sources` (records of files, hub data sets, functions) ->
`formats` (records checked) -> `decontamination` -> `encoding` (documents as tokens) -> `shards` (stored, with
`mapped` arrays and a manifest; `cache` finds them again) or `streaming` (tokenised while training) -> `interleaving`
and `rows` (one global order, resumable) -> `corpus`, which does all of it: `prepare`, `open_rows`, `describe`.
"""
