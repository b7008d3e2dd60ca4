"""Device code of kernels/cute_gemm.py: a persistent GEMM for Hopper (sm_90a) in CuTe DSL.

Needs nvidia-cutlass-dsl.

Three warpgroups a block. The first is the producer: one warp of it loads tiles of A and B by TMA
into a ring of stages, each with a "full" and an "empty" mbarrier; a cluster's blocks load parts of
the tiles that they share, and multicast them. The other two multiply by wgmma, from shared memory
into registers, and store C by TMA from buffers of their own, so that a store runs beside the next
product:

- cooperative: both have the same tile, half of its rows each;
- ping-pong: they take tiles in turn, and one stores while the other multiplies.

Sizes and row strides are arguments of the kernel: one kernel for all shapes of a type and config.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import pipeline, utils
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.utils import hopper_helpers

WARPGROUP = 128
"""Threads of a warpgroup."""
N_CONSUMERS = 2
N_THREADS = (1 + N_CONSUMERS) * WARPGROUP
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""Registers a thread.

A block has 65,536, the same for each of its threads until warpgroups give some up.
"""
WGMMA_ROWS, WGMMA_K = 64, 16
"""Rows of a wgmma, which are also those of a piece of C, and its depth for 16-bit types."""
GROUP = 8
"""Rows of tiles that are walked together, column by column, so that tiles which run at once share
operands in the L2 cache.
"""
STORE_BARRIER, TURN_BARRIER = 1, 3
"""Named barriers, one for each multiplying warpgroup: its buffers of C; its turn to multiply."""
ALIGNMENT_BYTES = 1024
"""Of a tile in shared memory: the swizzle of 128-byte rows repeats after 8 of them."""


class CuteGemm:
    """C [M, N] = A [M, K] @ B [N, K].T for one type and config; what `cute.compile` compiles."""

    def __init__(self, dtype: type[cutlass.Numeric], config: dict[str, Any]) -> None:
        self.dtype = dtype
        self.tile = config["TILE_M"], config["TILE_N"], config["TILE_K"]
        self.cluster = config["CLUSTER_M"], config["CLUSTER_N"]
        self.n_stages = config["num_stages"]
        self.is_ping_pong = config["PING_PONG"]
        self.rows = self.tile[0] if self.is_ping_pong else self.tile[0] // N_CONSUMERS
        """Rows of a warpgroup in a tile."""
        self.piece = WGMMA_ROWS, config["STORE_N"]
        """What is stored at once."""
        self.n_buffers = config["STORE_BUFFERS"]

    def smem_layouts(self) -> tuple[Any, Any, Any]:
        """Swizzled layouts of the stages of A and B, and of both warpgroups' buffers of C."""
        row_major = utils.LayoutEnum.ROW_MAJOR
        a = hopper_helpers.make_smem_layout_a(row_major, self.tile, self.dtype, self.n_stages)
        b = hopper_helpers.make_smem_layout_b(row_major, self.tile, self.dtype, self.n_stages)
        return (
            a,
            b,
            hopper_helpers.make_smem_layout_epi(
                self.dtype, row_major, self.piece, self.n_buffers * N_CONSUMERS
            ),
        )

    def warpgroup_mma(self, n: int) -> Any:
        """The wgmma of one warpgroup with `n` columns; rows of A and B lie along K."""
        along_k = warpgroup.OperandMajorMode.K
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            along_k,
            along_k,
            acc_dtype=cutlass.Float32,
            atom_layout_mnk=(1, 1, 1),
            tiler_mn=(WGMMA_ROWS, n),
        )

    def load_by_tma(self, source: Any, layout: Any, rows: int, n_sharing: int) -> Any:
        """TMA's copy atom and coordinates for tiles of A or B, whose parts `n_sharing` blocks load
        for each other.
        """
        op = (
            cpasync.CopyBulkTensorTileG2SMulticastOp()
            if n_sharing > 1
            else cpasync.CopyBulkTensorTileG2SOp()
        )
        stage = cute.slice_(layout, (None, None, 0))
        return cpasync.make_tiled_tma_atom(
            op, source, stage, (rows, self.tile[2]), num_multicast=n_sharing
        )

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        max_clusters: cutlass.Int32,
        stream: Any,
    ) -> None:
        """Launch as many clusters as run at once, or as there are tiles for.

        Rows begin at multiples of 16 bytes.
        """
        (tile_m, tile_n, tile_k), (cluster_m, cluster_n) = self.tile, self.cluster
        a_layout, b_layout, c_layout = self.smem_layouts()
        a_load = self.load_by_tma(a, a_layout, tile_m, cluster_n)
        b_load = self.load_by_tma(b, b_layout, tile_n, cluster_m)
        buffer = cute.slice_(c_layout, (None, None, 0))
        c_store = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), c, buffer, self.piece
        )
        n_rows = cute.ceil_div(cute.size(c, mode=[0]), tile_m * cluster_m)
        n_cols = cute.ceil_div(cute.size(c, mode=[1]), tile_n * cluster_n)
        counts = n_rows, n_cols, cute.ceil_div(cute.size(a, mode=[1]), tile_k)
        self.kernel(a_load, b_load, c_store, counts).launch(
            grid=[cluster_m, cluster_n, cutlass.min(n_rows * n_cols, max_clusters)],
            block=[N_THREADS, 1, 1],
            cluster=[cluster_m, cluster_n, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.jit
    def block_tile(
        self, index: cutlass.Int32, n_rows: cutlass.Int32, n_cols: cutlass.Int32
    ) -> tuple[Any, Any]:
        """Row and column of this block's tile in the cluster's tile `index`."""
        (cluster_m, cluster_n), (x, y, _) = self.cluster, cute.arch.block_idx()
        group = cutlass.const_expr(max(GROUP // cluster_m, 1))
        first = index // (group * n_cols) * group
        height, within = cutlass.min(n_rows - first, group), index % (group * n_cols)
        return (first + within % height) * cluster_m + x, within // height * cluster_n + y

    @cute.kernel
    def kernel(
        self,
        a_load: tuple[Any, Any],
        b_load: tuple[Any, Any],
        c_store: tuple[Any, Any],
        counts: tuple[Any, Any, Any],
    ) -> None:
        """One block; `counts`: rows and columns of cluster tiles, and tiles along K."""
        (tile_m, tile_n, tile_k), (cluster_m, cluster_n) = self.tile, self.cluster
        a_layout, b_layout, c_layout = self.smem_layouts()
        memory = utils.SmemAllocator()
        barriers = memory.allocate_array(cutlass.Int64, 2 * self.n_stages)
        a_smem = memory.allocate_tensor(self.dtype, a_layout.outer, ALIGNMENT_BYTES, a_layout.inner)
        b_smem = memory.allocate_tensor(self.dtype, b_layout.outer, ALIGNMENT_BYTES, b_layout.inner)
        c_smem = memory.allocate_tensor(self.dtype, c_layout.outer, ALIGNMENT_BYTES, c_layout.inner)
        # One thread of each consuming warp tells each block whose loads it has used: those in this
        # block's row and column of the cluster.
        n_releases = (
            (cluster_m + cluster_n - 1)
            * (WARPGROUP // 32)
            * (1 if self.is_ping_pong else N_CONSUMERS)
        )
        ring = pipeline.PipelineTmaAsync.create(
            num_stages=self.n_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, n_releases),
            tx_count=(tile_m + tile_n) * tile_k * self.dtype.width // 8,
            barrier_storage=barriers,
            cta_layout_vmnk=cute.make_layout((1, cluster_m, cluster_n, 1)),
        )
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx < WARPGROUP // 32:
            cute.arch.warpgroup_reg_dealloc(PRODUCER_REGISTERS)
            if warp_idx == 0:
                self.produce(ring, (a_load, a_smem), (b_load, b_smem), counts)
        else:
            cute.arch.warpgroup_reg_alloc(CONSUMER_REGISTERS)
            self.consume(ring, (a_smem, b_smem, c_smem), c_store, counts)
        if cutlass.const_expr(cluster_m * cluster_n > 1):
            # A block stays until the others have told its barriers of their last releases.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def produce(self, ring: Any, a: Any, b: Any, counts: Any) -> None:
        """The loading warp: all tiles of this block, one stage after the other."""
        (tile_m, tile_n, tile_k), (cluster_m, cluster_n) = self.tile, self.cluster
        ((a_atom, a_source), a_smem), ((b_atom, b_source), b_smem), (n_rows, n_cols, n_k) = (
            a,
            b,
            counts,
        )
        blocks = cute.make_layout((1, cluster_m, cluster_n, 1))
        here = blocks.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
        a_mask = (
            cpasync.create_tma_multicast_mask(blocks, here, 2)
            if cutlass.const_expr(cluster_n > 1)
            else None
        )
        b_mask = (
            cpasync.create_tma_multicast_mask(blocks, here, 1)
            if cutlass.const_expr(cluster_m > 1)
            else None
        )
        a_tiles = cute.group_modes(cute.local_tile(a_source, (tile_m, tile_k), (None, None)), 0, 2)
        b_tiles = cute.group_modes(cute.local_tile(b_source, (tile_n, tile_k), (None, None)), 0, 2)
        a_stages, a_parts = cpasync.tma_partition(
            a_atom, here[2], cute.make_layout(cluster_n), cute.group_modes(a_smem, 0, 2), a_tiles
        )
        b_stages, b_parts = cpasync.tma_partition(
            b_atom, here[1], cute.make_layout(cluster_m), cute.group_modes(b_smem, 0, 2), b_tiles
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.n_stages)
        for index in cutlass.range(
            cute.arch.block_idx()[2], n_rows * n_cols, cute.arch.grid_dim()[2], unroll=1
        ):
            row, col = self.block_tile(index, n_rows, n_cols)
            for k in cutlass.range(n_k, unroll=1):
                # The stage is empty; its barrier now waits for the bytes of both tiles.
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                cute.copy(
                    a_atom,
                    a_parts[(None, row, k)],
                    a_stages[(None, state.index)],
                    tma_bar_ptr=full,
                    mcast_mask=a_mask,
                )
                cute.copy(
                    b_atom,
                    b_parts[(None, col, k)],
                    b_stages[(None, state.index)],
                    tma_bar_ptr=full,
                    mcast_mask=b_mask,
                )
                state.advance()

    @cute.jit
    def consume(self, ring: Any, smem: Any, c_store: Any, counts: Any) -> None:
        """A multiplying warpgroup: its rows of all tiles, or all rows of its tiles."""
        (a_smem, b_smem, c_smem), (n_rows, n_cols, n_k) = smem, counts
        first, step = cute.arch.block_idx()[2], cute.arch.grid_dim()[2]
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP // 32) - 1
        mma = self.warpgroup_mma(self.tile[1])
        part = mma.get_slice(cute.arch.thread_idx()[0] % WARPGROUP)
        rows = cute.local_tile(
            a_smem,
            (self.rows, self.tile[2], self.n_stages),
            (0 if self.is_ping_pong else group, 0, 0),
        )
        a, b = (
            mma.make_fragment_A(part.partition_A(rows)),
            mma.make_fragment_B(part.partition_B(b_smem)),
        )
        sums = cute.make_rmem_tensor(
            mma.partition_shape_C((self.rows, self.tile[1])), cutlass.Float32
        )
        # Stages that the block has used before this warpgroup's tile.
        n_used, n_tiles = (cutlass.Int32(0), n_rows * n_cols)
        next_tile = step
        if cutlass.const_expr(self.is_ping_pong):
            n_used, first, step = group * n_k, first + group * step, step * N_CONSUMERS
            if group == 1:
                self.pass_turn(group)
        for index in cutlass.range(first, n_tiles, step, unroll=1):
            row, col = self.block_tile(index, n_rows, n_cols)
            phase = n_used // self.n_stages % 2
            read = pipeline.PipelineState(self.n_stages, n_used, n_used % self.n_stages, phase)
            done = pipeline.PipelineState(self.n_stages, n_used, n_used % self.n_stages, phase)
            if cutlass.const_expr(self.is_ping_pong):
                cute.arch.barrier(
                    barrier_id=TURN_BARRIER + group, number_of_threads=N_CONSUMERS * WARPGROUP
                )
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for k in cutlass.range(n_k, unroll=1):
                ring.consumer_wait(read)
                warpgroup.fence()
                for block in cutlass.range_constexpr(self.tile[2] // WGMMA_K):
                    cute.gemm(
                        mma,
                        sums,
                        a[(None, None, block, read.index)],
                        b[(None, None, block, read.index)],
                        sums,
                    )
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(1)  # the products of the stage before are done
                if k > 0:
                    ring.consumer_release(done)
                    done.advance()
                read.advance()
            if cutlass.const_expr(self.is_ping_pong):
                if index + next_tile < n_tiles:
                    self.pass_turn(group)
            warpgroup.wait_group(0)
            ring.consumer_release(done)
            n_used += n_k * (N_CONSUMERS if self.is_ping_pong else 1)
            self.store(sums, c_smem, c_store, (row, col, group))
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % (WARPGROUP // 32) == 0:
            # Shared memory is gone when the block is.
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def pass_turn(self, group: Any) -> None:
        """Let the other warpgroup multiply.

        For speed, and because a warpgroup sees only every other lap of a stage: its wait for a
        phase takes the one two before for it. So it begins when the other one has waited for all
        stages of the tile before.
        """
        cute.arch.barrier_arrive(
            barrier_id=TURN_BARRIER + 1 - group, number_of_threads=N_CONSUMERS * WARPGROUP
        )

    @cute.jit
    def store(self, sums: Any, c_smem: Any, c_store: Any, where: Any) -> None:
        """A warpgroup's sums, by pieces: rounded, written to a buffer by stmatrix, stored by TMA,
        which cuts off what is outside of C.
        """
        (row, col, group), (atom, target) = where, c_store
        thread, is_storing = (
            cute.arch.thread_idx()[0] % WARPGROUP,
            cute.arch.make_warp_uniform(cute.arch.warp_idx()) % (WARPGROUP // 32) == 0,
        )
        mma = self.warpgroup_mma(self.piece[1])
        to_smem = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma
        )
        lane = to_smem.get_slice(thread)
        rounded = cute.make_rmem_tensor(mma.partition_shape_C(self.piece), self.dtype)
        buffers = lane.partition_D(c_smem)
        pieces = cute.group_modes(cute.local_tile(target, self.piece, (None, None)), 0, 2)
        sources, targets = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(c_smem, 0, 2), pieces
        )
        n_across, n_values = self.tile[1] // self.piece[1], cute.size(rounded)
        first_row = row * (self.tile[0] // WGMMA_ROWS) + (
            0 if self.is_ping_pong else group * (self.rows // WGMMA_ROWS)
        )
        for each in cutlass.range_constexpr(self.rows // WGMMA_ROWS * n_across):
            buffer = group * self.n_buffers + each % self.n_buffers
            # A thread's sums go along columns first, as the pieces do.
            for value in cutlass.range_constexpr(n_values):
                rounded[value] = self.dtype(sums[each * n_values + value])
            if is_storing:
                # The buffer's last store has read it.
                cute.arch.cp_async_bulk_wait_group(self.n_buffers - 1, read=True)
            cute.arch.barrier(barrier_id=STORE_BARRIER + group, number_of_threads=WARPGROUP)
            cute.copy(to_smem, lane.retile(rounded), buffers[(None, None, None, buffer)])
            cute.arch.fence_proxy(
                cute.arch.ProxyKind.async_shared, space=cute.arch.SharedSpace.shared_cta
            )
            cute.arch.barrier(barrier_id=STORE_BARRIER + group, number_of_threads=WARPGROUP)
            if is_storing:
                cute.copy(
                    atom,
                    sources[(None, buffer)],
                    targets[(None, first_row + each // n_across, col * n_across + each % n_across)],
                )
                cute.arch.cp_async_bulk_commit_group()


def compiled(dtype: str, config: dict[str, Any], options: str) -> Any:
    """The kernel of a type ("Float16", "BFloat16") and config, for matrices of any size whose rows
    begin at multiples of 16 bytes.
    """
    element = getattr(cutlass, dtype)
    m, n, k = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def matrix(rows: Any, cols: Any) -> Any:
        pitch = cute.sym_int64(divisibility=128 // element.width)
        return make_fake_tensor(element, (rows, cols), (pitch, 1), assumed_align=16)

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    operands = matrix(m, k), matrix(n, k), matrix(m, n)
    return cute.compile(
        CuteGemm(element, config), *operands, cutlass.Int32(1), stream, options=options
    )
