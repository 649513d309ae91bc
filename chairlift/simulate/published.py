"""Published end-to-end throughput, and the simulation of each setting.

LMDeploy's figures are of its A100 page (docs/en/benchmark/a100_fp16.md). ShareGPT's lengths themselves cannot be
shipped. Its mean output is what the figures imply (tokens over requests: 232.7, 232.6 and 232.8), its mean prompt the
commonly stated 220; both are taken as lognormal, cut off at 1,024 as the usual filter does.
"""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.measure.workload import Workload
from chairlift.simulate.catalogue import HARDWARE, MODELS
from chairlift.simulate.cost import roofline
from chairlift.simulate.lengths import draw_lengths
from chairlift.simulate.search import Setting, outcome_metrics
from chairlift.simulate.sizes import Deployment
from chairlift.simulate.workloads import synthetic_workload

SHAREGPT_PROMPT, SHAREGPT_OUTPUT = "lognormal:230:1.2:1024", "lognormal:240:1:1024"
ENGINE = "distserve"  # an engine in C++, as LMDeploy's is; its coefficients know nothing of the figures below


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A figure that was published, with the setting that it was measured in.

    Attributes:
        name: for people.
        model, devices: what ran on how many A100-80G.
        batch: sequences in a batch.
        static: static batches of 128 prompt and 128 output tokens; else ShareGPT's lengths, continuously.
        output_throughput: output tokens a second.
        deviation: why the simulation deviates.
    """

    name: str
    model: str
    devices: int
    batch: int
    static: bool
    output_throughput: float
    deviation: str

    def simulate(self, count: int | None = None) -> float:
        """Output tokens a second, of ``count`` requests."""
        deployment = Deployment(
            model=MODELS[self.model],
            hardware=HARDWARE["a100-80g"],
            tensor_parallel_size=self.devices,
            max_model_len=min(4096, MODELS[self.model].max_position_embeddings),
            max_num_seqs=self.batch,
            max_num_batched_tokens=8192,
        )
        setting = Setting(
            deployment=deployment,
            cost=roofline(deployment, ENGINE),
            static_batch_size=self.batch if self.static else None,
        )
        return outcome_metrics(setting.run(self._workload(count)))["output_throughput"]

    def _workload(self, count: int | None) -> Workload:
        if self.static:
            return synthetic_workload(draw_lengths("128", "128", count or 4 * self.batch))
        return synthetic_workload(draw_lengths(SHAREGPT_PROMPT, SHAREGPT_OUTPUT, count or 3000))


PUBLISHED = (
    Published(
        name="Llama-2-13B, ShareGPT, batch 128",
        model="llama-2-13b",
        devices=1,
        batch=128,
        static=False,
        output_throughput=1850,
        deviation="",
    ),
    Published(
        name="Llama-2-7B, ShareGPT, batch 256",
        model="llama-2-7b",
        devices=1,
        batch=256,
        static=False,
        output_throughput=3387,
        deviation="",
    ),
    Published(
        name="Llama-2-70B on 4 devices, ShareGPT, batch 256",
        model="llama-2-70b",
        devices=4,
        batch=256,
        static=False,
        output_throughput=1683,
        deviation="",
    ),
    *(
        Published(
            name=f"Llama-2-7B, 128/128, static batch {batch}",
            model="llama-2-7b",
            devices=1,
            batch=batch,
            static=True,
            output_throughput=throughput,
            deviation="",
        )
        for batch, throughput in ((1, 102), (16, 1272), (32, 2125), (64, 3024))
    ),
)
