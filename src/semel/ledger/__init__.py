"""Both sides of "send an item once" (requirements D1-D5), without I/O.

The worker's side: `holdings` says what the engine holds and what each frontend has yet to be told of it, `desk` joins
submissions with the features that they wait for. The frontend's side: `ledger` replays what one worker announced, and
adds what was just sent to it. No order is mirrored: the side that holds the bytes announces, the other replays, and a
claim that is out of date costs one round trip (`Need`), never an answer.

What the rules rest on:

- In a session, control messages arrive in order, and a feature never before a control message sent ahead of it. A
  session that ends takes with it whatever was under way, on both sides.
- A call here and the message that it belongs to are one step, with no `await` between them: a worker opens a submission
  as it reads it and closes it as it says `Accepted` or `Failed` or reads `Abort`; a frontend settles a request as it
  reads those two or says `Abort`. The other side concludes from what it has not heard yet.
- A worker sends its announcements before anything else that it says, so that they are true when it accepts or asks.
- A frontend withdraws a transfer only if `Ledger.settle` named its digest. It sends what `submit` and `send` name, and
  answers a `Need` of every request that it has not given up.
"""

from semel.ledger.announcement import MAX_BATCH, Announcement, Gone, Have
from semel.ledger.holdings import Holdings
from semel.ledger.intake import Intake, Opened
from semel.ledger.ledger import Ledger

__all__ = ["MAX_BATCH", "Announcement", "Gone", "Have", "Holdings", "Intake", "Ledger", "Opened"]
