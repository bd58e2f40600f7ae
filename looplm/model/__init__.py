"""Pure PyTorch looped transformer: config, blocks, gate, cache, the loop itself, and its cost model.

Nothing here imports transformers, computes a loss, samples a token, draws a depth or knows of sharding.

Shape legend, used in every signature and trailing comment of the package:

    B batch          S sequence        R loops          L layers in the core
    D hidden size    H query heads     K key-value heads   V vocabulary
    d head dim       M cached (memory) positions a query may read

T is never used: the field writes it for both sequence length and loops.

Reading order: `config` -> `rope`, `attention`, `block` -> `injection`, `lora`, `gate`, `cache` -> `looped` -> `flops`.
"""
