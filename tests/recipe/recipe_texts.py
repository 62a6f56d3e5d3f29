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
