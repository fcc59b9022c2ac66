"""The laboratory of polarstep: the paper's experiments, and experiments of one's own.

A config (:mod:`.config`) comes from a recipe (:mod:`.recipes`) for a method (:mod:`.methods`), possibly
with a setting varied (:mod:`.axes`). A study (:mod:`.study`) says which of them are compared, and
:mod:`.jobs` makes its runs. One run is :mod:`.train`, and what it leaves is :mod:`.records`, from which
:mod:`.report` makes a page. :mod:`.tune` finds learning rates.

To read first: ``study.py``, ``recipes/nanogpt.py``, ``train/loop.py``, ``records/record.py`` and
``report/rows.py``.
"""
