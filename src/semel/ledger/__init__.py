"""Both sides of "send an item once" (requirements D1-D5), without I/O.

The worker's side: `holdings` has what the engine has, and how much of it each frontend has heard of; `intake`
joins submissions with the features that they wait for. The frontend's side: `ledger` replays the announcements of one
worker and adds what was just sent to it; `directory` says of all workers who has an item. Neither side mirrors an
eviction order: the side with the bytes announces, the other replays, and an outdated claim costs one round trip
(`Need`), never an answer.

The rules depend on these facts:

- In a session, control messages arrive in order, and a feature never before a control message sent ahead of it. When a
  session ends, everything in transfer is lost, on both sides.
- A call here and its message are one step, with no `await` between them. A worker opens a submission when it reads it,
  and closes it when it sends `Accepted` or `Failed` or reads `Abort`. A frontend settles a request when it reads
  `Accepted` or `Failed` or sends `Abort`. Each side draws conclusions from messages that have not arrived yet.
- Before a worker accepts a request, fails it or asks for its features, it sends that frontend all announcements that it
  has, so that they are true when it does. The other frontends may hear of them later.
- A frontend withdraws a transfer only if `Ledger.settle` returned its digest. It sends what `submit` and `send` return,
  and answers a `Need` of every request that it has not aborted.
"""

from semel.ledger.announcement import MAX_BATCH, Announcement
from semel.ledger.directory import Directory, Holders
from semel.ledger.holdings import Holdings
from semel.ledger.intake import Intake, Opened
from semel.ledger.ledger import Ledger

__all__ = ["MAX_BATCH", "Announcement", "Directory", "Holders", "Holdings", "Intake", "Ledger", "Opened"]
