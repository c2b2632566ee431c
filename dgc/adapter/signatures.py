"""The constructors of ``Compression``, for readers, editors and type checkers.

Written by tools/write_signatures.py: change the options in dgc/core and dgc/adapter/options.py instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict

from dgc.adapter.options import Compressor, Optimizer, Tensors, by_name

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dgc.adapter.job import ProcessSet
    from dgc.core.collectives import Transport

IndexCodec = Literal["uint16", "elias_fano"]
ValueCodec = Literal["float16", "float32", "int8", "int4", "int3", "int2"]


class CommonOptions(TypedDict, total=False):
    """Options of every compressor; :meth:`Constructors.dgc` explains them."""

    rampup_begin_step: int
    local_grad_clip_norm: float | None
    clip_scope: Literal["tensor", "global"]
    min_numel: int
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    small: ValueCodec
    bucket_bytes: int
    op: Any
    hierarchical: bool | int | Literal["auto"]
    exchange: Literal["auto", "gather"]
    transport: Literal["auto", "mpi", "horovod", "torch.distributed"] | Transport
    loss_scale: Any
    process_set: ProcessSet | None


class FeedbackOptions(CommonOptions, total=False):
    """Options of compressors that keep what they do not send."""

    momentum: float | None
    nesterov: bool | None
    weight_decay: float | None
    error_feedback: Literal["auto", "step-ahead", "classic", False]
    late: bool


class EntryOptions(FeedbackOptions, total=False):
    """Options of compressors that send some entries."""

    momentum_masking: bool | None


class Constructors(Generic[Tensors, Optimizer, Compressor]):
    """A constructor for each compressor of this package.

    Each returns a compressor to give to a wrapper as ``compression=``, which binds it to the model. For the wrappers of
    Horovod itself, pass the tensors and the optimizer here (on all ranks together). All raise what :meth:`dgc` does.
    """

    @by_name
    def dgc(
        self,
        parameters: Tensors | None = None,
        optimizer: Optimizer | None = None,
        *,
        sparsity: float | Sequence[float] | None = None,
        steps: int | None = None,
        rampup_begin_step: int = 0,
        rampup_step: int = 1,
        momentum: float | None = None,
        nesterov: bool | None = None,
        weight_decay: float | None = None,
        momentum_masking: bool | None = None,
        local_grad_clip_norm: float | None = None,
        clip_scope: Literal["tensor", "global"] = "tensor",
        min_numel: int = 1024,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        indices: IndexCodec = "elias_fano",
        values: ValueCodec | None = None,
        small: ValueCodec = "int3",
        bucket_bytes: int = 26214400,
        op: Any = "average",
        hierarchical: bool | int | Literal["auto"] = False,
        exchange: Literal["auto", "gather"] = "auto",
        error_feedback: Literal["auto", "step-ahead", "classic", False] = "auto",
        late: bool = False,
        transport: Literal["auto", "mpi", "horovod", "torch.distributed"] | Transport = "auto",
        loss_scale: Any = 1.0,
        process_set: ProcessSet | None = None,
    ) -> Compressor:
        """Deep Gradient Compression: send the largest accumulated entries, keep the rest for later.

        ``u <- m*u + G; v <- v + u`` (momentum correction). Of each tensor, the k = n * density entries with the largest
        ``|v|`` are sent. In v and u they become 0 (momentum factor masking).

        Args:
            parameters: the tensors to compress, for Horovod's own wrappers: ``model.named_parameters()`` in PyTorch,
                ``model.trainable_variables`` of a built model in TensorFlow.
            optimizer: whose tensors are compressed, and whose momentum is taken over.
            sparsity: The share of entries that are held back in a step. A list gives the shares to use one after
                another during the ramp-up. None: 0.999. With step-ahead error feedback and an adaptive optimizer, None
                is 0.9 in the first 1,000 steps and 0.98 later on two ranks, 0.968 on three and four, 0.95 on five to
                eight, 0.9 on nine to 16, and 0.5 on more.
            steps: The number of optimizer steps in the training; dgc chooses the sparsity for it.
            rampup_begin_step: The first step that is compressed; gradients (step-ahead: updates) of earlier steps are
                averaged uncompressed.
            rampup_step: The number of steps over which a list of sparsities is spread.
            momentum: The momentum that the compressor applies. None takes over the optimizer's momentum or Adam's
                beta1; 0 leaves momentum to the optimizer.
            nesterov: Whether this is Nesterov momentum; None takes the answer from the optimizer.
            weight_decay: The parameter times this number is added to its gradient; None takes over the optimizer's
                weight decay.
            momentum_masking: Set the momentum of an entry to 0 when the entry is sent; None: yes, except with ``steps``
                and SGD.
            local_grad_clip_norm: Scale each rank's gradient to an L2 norm of at most this number times the square root
                of the number of ranks.
            clip_scope: The norm that is limited. "tensor": the norm of each compressed tensor. "global": the norm of
                all gradients together, also before ``rampup_begin_step``.
            min_numel: Tensors with fewer elements are not compressed; they are sent in the form that ``small`` names.
            include: Name patterns (of ``fnmatch``) of tensors that are compressed even if they are 1-D or small.
            exclude: Name patterns of tensors that are never compressed but sent as float32.
            indices: The codec for the positions of sent entries.
            values: The codec for the values of sent entries. The default is "int4" with ``steps`` and an adaptive
                optimizer, and else "int2".
            small: The codec for tensors that are 1-D or small; "float32" sends them exactly.
            bucket_bytes: Bytes of float32 gradients that are sent together in one message.
            op: Average or sum: Horovod's constant, or the name "average" or "sum".
            hierarchical: True: the ranks of a node add up their gradients and send as one rank. "auto": only if that
                saves traffic. A number: groups of this many neighbouring ranks do so.
            exchange: "auto": where it saves enough bytes (from about 16 ranks on), each rank adds up a share of the
                positions for all ranks. "gather": every rank receives the messages of all others.
            error_feedback: "step-ahead": the optimizer steps on its rank's own gradient, updates are exchanged, and a
                rank uses at once what it has not sent. "classic": gradients are exchanged, as in the paper. "auto":
                "step-ahead" for an adaptive optimizer in PyTorch and Keras 3, unless an option is given that only
                "classic" has, or the sparsity is 0; else "classic". False drops what is not sent, for control
                experiments: accuracy collapses.
            late: With step-ahead error feedback: apply the other ranks' contributions one step late. The network's time
                then lies behind the next forward and backward pass.
            transport: The library that carries the messages; "auto" takes MPI if Horovod runs on MPI, else Horovod or
                torch.distributed.
            loss_scale: The factor of the loss: a number, a function that returns it, or the framework's loss scaler.
            process_set: The Horovod process set whose ranks exchange; None: all ranks.

        Raises:
            TypeError: an unknown option; the message lists the valid ones.
            ConfigError: an option out of range, momentum applied twice, or Horovod not initialised.
            LayoutError: ranks disagree about the tensors.

        Source: Lin et al. 2018, arXiv 1712.01887.
        """
        raise NotImplementedError

    @by_name
    def topk(
        self,
        parameters: Tensors | None = None,
        optimizer: Optimizer | None = None,
        *,
        threshold: Literal["tensor", "global"] = "tensor",
        headroom: float = 1.5,
        sparsity: float | Sequence[float] = 0.99,
        rampup_step: int = 1,
        indices: IndexCodec = "elias_fano",
        values: ValueCodec | None = "int2",
        **options: Unpack[EntryOptions],
    ) -> Compressor:
        """Send the entries above a threshold; the others wait in the residual.

        ``x = g + e``; ``x_i`` is sent if ``|x_i| > t``. t is chosen so that a share R of the entries is held back.

        Departures: with ``threshold="tensor"``, the default here, exactly the k largest entries of each tensor are
        sent, so that messages have a fixed size; the paper prefers one threshold for the model, from a sampled
        quantile. With ``threshold="global"``, t is the R-quantile of about 100 000 entries from all buckets. These are
        sampled in the previous step, because a bucket is sent before the gradients of other buckets are ready. In the
        first step, each bucket samples its own entries. A message then has room for ``headroom`` times the bucket's
        even share of entries. If more entries exceed t, the largest are sent, and the others stay in the residual.

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            threshold: "tensor": the k largest entries of each tensor; "global": one threshold for all tensors.
            headroom: With a global threshold, a bucket's message has room for this many times the bucket's even share
                of entries.
            sparsity: The share of entries that are held back in a step. A list gives the shares to use one after
                another during the ramp-up.
            rampup_step: The number of steps over which a list of sparsities is spread.
            indices: The codec for the positions of sent entries.
            values: The codec for the values of sent entries. The default is "int4" with ``steps`` and an adaptive
                optimizer, and else "int2".
            **options: those of :class:`EntryOptions`, explained at :meth:`dgc`; ``small`` is "float32", ``momentum`` is
                0.0, ``momentum_masking`` is False.

        Source: Aji and Heafield 2017, arXiv 1704.05021. The strided sample is taken from Marian.
        """
        raise NotImplementedError

    @by_name
    def strom(
        self,
        parameters: Tensors | None = None,
        optimizer: Optimizer | None = None,
        *,
        threshold: float = 0.01,
        max_density: float = 0.01,
        **options: Unpack[EntryOptions],
    ) -> Compressor:
        """Send +τ or -τ for entries beyond a fixed threshold τ, with error feedback.

        ``e <- e + g``. If ``e_i > τ``, +τ is sent and ``e_i <- e_i - τ``; if ``e_i < -τ``, -τ is sent and
        ``e_i <- e_i + τ``. So each step sends at most τ of an entry, however large its residual is. An entry takes one
        32-bit word: ``index << 1 | positive``.

        Departures: a message has room for ``max_density`` of the elements, so that ranks need not exchange sizes. If
        more entries are beyond τ, only the largest are sent. The paper's optional entropy code is left out.

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            threshold: The paper's τ, in units of the gradient. No value suits all models.
            max_density: A message has room for this share of the elements; further entries stay in the residual.
            **options: those of :class:`EntryOptions`, explained at :meth:`dgc`; ``small`` is "float32", ``momentum`` is
                0.0, ``momentum_masking`` is False.

        Source: Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech.
        """
        raise NotImplementedError

    @by_name
    def dryden(
        self,
        parameters: Tensors | None = None,
        optimizer: Optimizer | None = None,
        *,
        sparsity: float | Sequence[float] = 0.984375,
        rampup_step: int = 1,
        **options: Unpack[EntryOptions],
    ) -> Compressor:
        """Send a fixed share of the positive and of the negative entries, as the mean of each, with error feedback.

        ``x = g + e``. The ρ n+ largest of the n+ positive entries are sent as their mean μ+. The ρ n- smallest of the
        n- negative entries are sent as their mean μ-. At least one entry of each sign is sent. ``e = x - μ±`` for sent
        entries, else x. An entry takes one 32-bit word, ``index << 1 | positive``; a tensor takes two floats. ρ is
        1 - ``sparsity``, by default LBANN's 1/64.

        Departures: shares and means are exact instead of sampled, and belong to a tensor instead of a matrix column.

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            sparsity: The share of entries that are held back in a step. A list gives the shares to use one after
                another during the ramp-up.
            rampup_step: The number of steps over which a list of sparsities is spread.
            **options: those of :class:`EntryOptions`, explained at :meth:`dgc`; ``small`` is "float32", ``momentum`` is
                0.0, ``momentum_masking`` is False.

        Source: Dryden et al. 2016, "Communication quantization for data-parallel training of deep neural networks",
        MLHPC.
        """
        raise NotImplementedError

    @by_name
    def adacomp(
        self,
        parameters: Tensors | None = None,
        optimizer: Optimizer | None = None,
        *,
        conv_bin: int = 50,
        fc_bin: int = 500,
        entries_per_bin: float = 5.0,
        **options: Unpack[EntryOptions],
    ) -> Compressor:
        """Adaptive residual compression: a soft threshold in each bin, signs with one scale per tensor.

        ``G = e + dW``; ``H = G + dW``. In each bin of L_T elements, entries with ``|H_i| >= max|G|`` of the bin are
        sent as ``s * sign(G_i)``, where s is the mean of ``max|G|`` over the bins. ``e = G - s * sign(G)`` for sent
        entries, else G. If L_T < 64, an entry takes 8 bits: 6 for the index in its bin, one for the sign, and one that
        ends the bin. Otherwise it takes 16 bits, 14 for the index. An empty bin takes one such unit, unless all later
        bins are empty too.

        Departures: a message has room for ``entries_per_bin`` entries per bin on average (5, which gives the paper's
        rates of 40 for convolutions and 200 for matrices). If that does not suffice, some bins are not sent; each step
        begins at another bin. The paper uses two bits for a ternary value; here one of them ends the bin.

        The method is claimed in the patent US 11,295,208.

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            conv_bin: L_T, the elements in a bin of a tensor with more than two dimensions. Up to 63, an entry takes 8
                bits.
            fc_bin: The same for a matrix.
            entries_per_bin: A message has room for this many entries per bin on average; further entries stay in the
                residual.
            **options: those of :class:`EntryOptions`, explained at :meth:`dgc`; ``small`` is "float32", ``momentum`` is
                0.0, ``momentum_masking`` is False.

        Source: Chen et al. 2018, "AdaComp: adaptive residual gradient compression for data-parallel distributed
        training", AAAI, arXiv 1712.02679.
        """
        raise NotImplementedError

    @by_name
    def onebit(
        self,
        parameters: Tensors | None = None,
        optimizer: Optimizer | None = None,
        *,
        means: Literal["column", "row", "tensor"] = "column",
        **options: Unpack[FeedbackOptions],
    ) -> Compressor:
        """Send only the sign of each entry, and the mean of each sign, with error feedback.

        ``x = g + e``; bit = (x >= 0). In each column, the mean of the entries with the same bit replaces them (0 if
        there are none), and ``e = x - mean``. A tensor takes n bits and two floats per column. A tensor with more than
        two dimensions counts as a matrix: its first dimension x all others. Kernels of convolutions have short columns;
        ``means="row"`` costs less there.

        Departure: the paper's ranks quantise the sum a second time, with another residual. Here every rank receives
        every message and adds them in full precision.

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            means: The entries that share a pair of means: a "column" or a "row" of the matrix (first dimension x all
                others), or the whole "tensor".
            **options: those of :class:`FeedbackOptions`, explained at :meth:`dgc`; ``small`` is "float32", ``momentum``
                is 0.0.

        Source: Seide et al. 2014, "1-bit stochastic gradient descent and its application to data-parallel distributed
        training of speech DNNs", Interspeech.
        """
        raise NotImplementedError

    @by_name
    def qsgd(
        self,
        parameters: Tensors | None = None,
        optimizer: Optimizer | None = None,
        *,
        bits: Literal[2, 4, 8] = 4,
        bucket_size: int = 512,
        norm: Literal["l2", "max"] = "l2",
        seed: int = 0,
        **options: Unpack[CommonOptions],
    ) -> Compressor:
        """Quantised SGD: round each entry at random to one of a few levels, without bias and without error feedback.

        In each bucket of d elements ``Q(x_i) = norm * sign(x_i) * ξ_i``. With ``a = |x_i| * s / norm``, ξ is
        ``(floor(a) + 1) / s`` with probability ``a - floor(a)``, else ``floor(a) / s``. For the L2 norm its variance is
        at most ``min(d / s², sqrt(d) / s) * norm²``. An element takes ceil(log2(2s + 1)) bits, a bucket one float.

        Departure: codes have a fixed length, unlike the paper's Elias codes, so that ranks need not exchange sizes.

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            bits: 2, 4 or 8 bits: s = 1, 7 or 127 levels of each sign.
            bucket_size: The number of elements that share a norm (the paper's bucket).
            norm: "l2" as in the paper's analysis, or "max" as in its experiments, which gives less variance and fewer
                zeros.
            seed: Seed of the random numbers. These also depend on rank, step and tensor.
            **options: those of :class:`CommonOptions`, explained at :meth:`dgc`; ``small`` is "float32".

        Source: Alistarh et al. 2017, arXiv 1610.02132.
        """
        raise NotImplementedError

    @by_name
    def terngrad(
        self,
        parameters: Tensors | None = None,
        optimizer: Optimizer | None = None,
        *,
        clip_factor: float | None = 2.5,
        seed: int = 0,
        **options: Unpack[CommonOptions],
    ) -> Compressor:
        """Ternary gradients: -1, 0 or 1 times one scale per tensor, at random, without error feedback.

        Each tensor is clipped at ``±c σ`` with ``σ² = mean((g - mean g)²)``, unless σ = 0. After that, ``s = max|g|``
        over all ranks ("scaler sharing": one small allreduce before the exchange), and ``q = s * sign(g) * b``, where b
        is 1 with the probability ``|g| / s``, else 0. So q equals the clipped gradient on average. A byte holds five
        entries of 1.6 bits; a tensor takes one float.

        Departures: a byte holds five entries instead of four. The option ``exclude`` names the layers that are left
        out.

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            clip_factor: Entries are clipped at this many standard deviations of their tensor; None: they are not
                clipped.
            seed: Seed of the random numbers. These also depend on rank, step and tensor.
            **options: those of :class:`CommonOptions`, explained at :meth:`dgc`; ``small`` is "float32".

        Source: Wen et al. 2017, arXiv 1705.07878, Algorithm 1 and sections 3.2 and 3.3.
        """
        raise NotImplementedError

    @by_name
    def dorefa(
        self,
        parameters: Tensors | None = None,
        optimizer: Optimizer | None = None,
        *,
        bits: int = 4,
        seed: int = 0,
        **options: Unpack[CommonOptions],
    ) -> Compressor:
        """k-bit gradients: each entry becomes one of 2^k levels, at random and without bias, without error feedback.

        ``f(r) = 2M [quantise_k(r / 2M + 1/2 + noise) - 1/2]`` with ``M = max|r|`` of the tensor, noise uniform in
        ``±1/2 / (2^k - 1)`` and ``quantise_k(z) = round((2^k - 1) z) / (2^k - 1)``. The levels are odd multiples of
        ``M / (2^k - 1)``: zero is not a level and becomes one of its two neighbours. An element takes k bits, a tensor
        one float.

        Departure: the paper quantises the gradients of activations, with one M per image. Here the gradients of weights
        are quantised, with one M per tensor.

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            bits: k, from 1 to 8. In the paper, accuracy suffers below 4 bits.
            seed: Seed of the random numbers. These also depend on rank, step and tensor.
            **options: those of :class:`CommonOptions`, explained at :meth:`dgc`; ``small`` is "float32".

        Source: Zhou et al. 2016, arXiv 1606.06160, equation 12.
        """
        raise NotImplementedError
