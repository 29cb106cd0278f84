"""Which rank of how many this is; the stand-in has one."""


class Mapping:
    """Ranks of a model in parallel."""

    def __init__(self, world_size=1, rank=0, gpus_per_node=8, *, cp_size=1, tp_size=1, pp_size=1, **others):
        if world_size != tp_size * pp_size * cp_size:
            raise ValueError(f"world_size {world_size} != tp {tp_size} x pp {pp_size} x cp {cp_size}")
        if world_size != 1:
            raise NotImplementedError("the stand-in has one rank")
        self.world_size, self.rank, self.gpus_per_node = world_size, rank, gpus_per_node
        self.tp_size, self.pp_size, self.cp_size = tp_size, pp_size, cp_size

    @classmethod
    def from_dict(cls, mapping):
        """The other way round."""
        return cls(**mapping)

    def to_dict(self):
        """For config.json."""
        return {"world_size": self.world_size, "tp_size": self.tp_size, "pp_size": self.pp_size}
