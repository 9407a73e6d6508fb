"""The media store: files that clients have uploaded, by content and tenant, on a disk or in a bucket.

`names` and `index` are pure: what an object is called, and which files stay. `objects` does the I/O, through obstore.
`store` puts them together as `MediaStore`.
"""

from semel.store.index import Page
from semel.store.names import StoredFile
from semel.store.upload import Pin, Upload, no_pin

__all__ = ["Page", "Pin", "StoredFile", "Upload", "no_pin"]
