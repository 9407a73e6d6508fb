"""Claims of README and docs that can be compared with the code: a module with a table for each class of them.

A function here takes pages by their paths and yields a line for each claim that is not true. `test_claims.py`
calls it with the pages that there are, and with planted lies. What is generated (the reference, the tables of models
and attacks, the OpenAPI document) is compared where it is made.
"""
