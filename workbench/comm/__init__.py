"""Communication between ranks: groups, collectives for pieces of any sizes, and a record of it."""

from workbench.comm.all_reduce import all_reduce as all_reduce
from workbench.comm.all_reduce import start_all_reduce as start_all_reduce
from workbench.comm.collectives import all_gather as all_gather
from workbench.comm.collectives import all_to_all as all_to_all
from workbench.comm.collectives import broadcast as broadcast
from workbench.comm.collectives import reduce_scatter as reduce_scatter
from workbench.comm.groups.group import Group as Group
from workbench.comm.groups.world import RankConfig as RankConfig
from workbench.comm.groups.world import World as World
from workbench.comm.messages.errors import CodecError as CodecError
from workbench.comm.messages.errors import CommError as CommError
from workbench.comm.messages.errors import CommTimeout as CommTimeout
from workbench.comm.messages.errors import PeerLost as PeerLost
from workbench.comm.messages.recorder import Record as Record
from workbench.comm.messages.recorder import Recorder as Recorder
from workbench.comm.pending import Pending as Pending
