"""What every engine is asked: chat prompts of about 60 tokens, a text to copy, a long prompt."""

from __future__ import annotations

from typing import Any

from foretell.bench.workloads import default_workload

CHAT = (
    "Write a long and detailed short story about a lighthouse keeper who finds a message in a "
    "bottle on a stormy night.",
    "Write a Python class named Stack with push, pop, peek and is_empty methods, with a docstring "
    "for each method and a short usage example.",
    "Explain in detail, step by step, how a bicycle stays upright while it is moving, and why it "
    "falls over when it stops.",
    "Give me a numbered list of fifteen practical tips for a person who is about to start a new "
    "job in a big city.",
    "Describe the main causes of the French Revolution, and explain how each of them changed the "
    "daily life of ordinary people in Paris.",
)
COPY = """Copy the following text word for word, without changing anything:

The harbour at Westmere was built in 1842 by the engineer Thomas Calloway, who had worked on the \
canals in the north before he came to the coast. The first stone was laid on the ninth of March, \
and the work took eleven years to finish. The outer wall is four hundred metres long and twelve \
metres wide at the base, and it is made of granite blocks that were brought by boat from the \
quarries at Penlow. The inner wall is shorter, and it was rebuilt in 1903 after a storm broke it \
in three places. There are two lights at the end of the outer wall. The green light marks the \
north side of the entrance and the red light marks the south side of the entrance. The lights \
were run on oil until 1926, when they were changed to electric power. The harbour master lives in \
the white house at the top of the steps, and his office is on the ground floor of the same house. \
Every boat that comes into the harbour must send a message to the harbour master, and every boat \
must pay a fee of four pounds for each night that it stays. Fishing boats that belong to the \
village do not pay the fee. In the winter the harbour is closed when the wind is from the east, \
because the waves come over the outer wall and fill the smaller boats with water. In the summer \
there is a market on the quay every Saturday, where people from the village sell fish, bread, \
cheese and honey to the visitors who come by train from the city."""
LONG = 1000
"""Tokens of the long prompt, template included."""


def prompts(llm: Any) -> dict[str, list[list[int]]]:
    """Token ids by kind, as the model's chat template writes them."""

    def chat(text: str) -> list[int]:
        return llm.chat_prompt([{"role": "user", "content": text}])

    text = "\n\n".join(turn for c in default_workload() for turn in c.turns)
    empty = len(chat(""))
    ids = llm.tokenizer.encode(text)[: LONG - empty]
    return {
        "chat": [chat(text) for text in CHAT],
        "long": [chat(llm.tokenizer.decode(ids))],
        "copy": [chat(COPY)],
    }
