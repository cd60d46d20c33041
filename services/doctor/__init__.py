"""What is wrong with a deployment and what to do about it: facts gathered by reading alone, judged by pure functions.

`gathering` asks the broker, `machine` looks at this computer; `judging` makes findings of what they found.
"""

__all__: list[str] = []
