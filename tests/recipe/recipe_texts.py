from corral.recipe.shape import ModelShape

MINIMAL = """\
name: test
model:
  path: some/model
data:
  train:
    path: rows.jsonl
schedule:
  steps: 10
"""
QWEN_7B = ModelShape(3584, 28, 28, 4, 128, 18944, 152064, tie_word_embeddings=False, qkv_bias=True)
QWEN_72B = ModelShape(8192, 80, 64, 8, 128, 29568, 152064, tie_word_embeddings=False, qkv_bias=True)
