"""Is a split model the same as the whole one? A comparison module by module.

```python
report = proof.prove(make, functools.partial(plait.parallelize, device_mesh=mesh), batch, mesh=mesh)
print(report)  # the first module that differs, and why
```
"""

from plait.proof.comparison import compare, prove
from plait.proof.report import Report, Row
from plait.proof.runs import attempt, jointly

__all__ = ["Report", "Row", "attempt", "compare", "jointly", "prove"]
