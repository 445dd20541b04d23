"""Communication between ranks: groups, collectives for pieces of any sizes, and a record of it."""

from workbench.comm.collectives import all_gather as all_gather
from workbench.comm.collectives import all_reduce as all_reduce
from workbench.comm.collectives import all_to_all as all_to_all
from workbench.comm.collectives import broadcast as broadcast
from workbench.comm.collectives import reduce_scatter as reduce_scatter
from workbench.comm.errors import CodecError as CodecError
from workbench.comm.errors import CommError as CommError
from workbench.comm.errors import CommTimeout as CommTimeout
from workbench.comm.errors import PeerLost as PeerLost
from workbench.comm.group import Group as Group
from workbench.comm.pending import Pending as Pending
from workbench.comm.pending import start_all_reduce as start_all_reduce
from workbench.comm.record import Record as Record
from workbench.comm.record import Recorder as Recorder
from workbench.comm.world import Seat as Seat
from workbench.comm.world import World as World
