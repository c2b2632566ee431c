"""What each constructor of ``Compression`` takes, for readers, editors and type checkers.

Options are checked by :func:`dgc.core.compressors.make_config`. Tests hold names, types, defaults and sentences here
together with those of the core.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Protocol, TypedDict, TypeVar, cast

from dgc.core.checks import no_compressor
from dgc.core.config import DEFAULT_BUCKET_BYTES

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dgc.adapter.job import ProcessSet
    from dgc.core.collectives import Transport

IndexCodec = Literal["elias_fano", "uint16"]
"""How the positions of sent entries are coded."""
ValueCodec = Literal["int2", "int3", "int8", "float16", "float32"]
"""How values are coded."""

Tensors = TypeVar("Tensors")
Optimizer = TypeVar("Optimizer")
Compressor = TypeVar("Compressor")
Function = TypeVar("Function", bound=Callable[..., Any])


class SupportsCompress(Protocol):
    """What ``compression=`` takes: a compressor of this package, or one of Horovod's."""

    def compress(self, tensor: Any) -> Any:
        """Return what is sent, and what :meth:`decompress` needs."""

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the gradient."""


Compressing = SupportsCompress | type[SupportsCompress] | None
"""Horovod's own are classes, which are not called."""


class CommonOptions(TypedDict, total=False):
    """Options of every compressor, explained at :meth:`Constructors.dgc`, as are those of the next two."""

    rampup_begin_step: int
    local_grad_clip_norm: float | None
    clip_scope: Literal["tensor", "global"]
    min_numel: int
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    small: ValueCodec
    bucket_bytes: int
    op: Any
    sparse_updates: bool
    hierarchical: bool | int | Literal["auto"]
    transport: Literal["auto", "mpi", "horovod", "torch.distributed"] | Transport
    loss_scale: Any
    process_set: ProcessSet | None


class FeedbackOptions(CommonOptions, total=False):
    """Options of compressors that keep what they do not send."""

    momentum: float | None
    nesterov: bool | None
    weight_decay: float | None


class EntryOptions(FeedbackOptions, total=False):
    """Options of compressors that send some entries."""

    momentum_masking: bool | None


def refused_uncalled(make: Function) -> Function:
    """Let a constructor that Horovod's own wrapper got without parentheses say so in the first step."""

    def compress(*_: object) -> NoReturn:
        raise no_compressor(make)

    vars(make)["compress"] = compress
    return make


def by_name(function: Function) -> Function:
    """A declared constructor, which hands what its caller gives, and no defaults, to ``_make`` under its own name."""

    @functools.wraps(function)
    def make(self: Any, *args: Any, **options: Any) -> Any:
        return self._make(function.__name__, *args, **options)

    return cast("Function", refused_uncalled(make))


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
        sparsity: float | Sequence[float] = 0.999,
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
        values: ValueCodec = "int2",
        small: ValueCodec = "int3",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        op: Any = "average",
        sparse_updates: bool = True,
        hierarchical: bool | int | Literal["auto"] = False,
        transport: Literal["auto", "mpi", "horovod", "torch.distributed"] | Transport = "auto",
        loss_scale: Any = 1.0,
        process_set: ProcessSet | None = None,
    ) -> Compressor:
        """Deep Gradient Compression: send the largest accumulated entries, keep the rest for later.

        Args:
            parameters: the tensors to compress, for Horovod's own wrappers: ``model.named_parameters()`` in PyTorch,
                ``model.trainable_variables`` of a built model in TensorFlow.
            optimizer: whose tensors are compressed, and whose momentum is taken over.
            sparsity: The share of entries that are held back in a step; a list is walked through during the ramp-up.
            steps: The number of steps of the whole training, which chooses the sparsity for it.
            rampup_begin_step: The first step that is compressed; gradients of the steps before it are averaged as they
                are.
            rampup_step: The number of steps in which the list of sparsities is walked through.
            momentum: The momentum that is corrected; None takes over the optimizer's momentum or Adam's beta1, 0
                leaves it there.
            nesterov: Whether that momentum is Nesterov's; None takes it over from the optimizer.
            weight_decay: This number times the parameter is added to its gradient; None takes the optimizer's over.
            momentum_masking: Set the momentum of an entry to 0 when the entry is sent; None: yes, but not with
                ``steps`` and an SGD.
            local_grad_clip_norm: Scale each rank's gradient to an L2 norm of at most this number times the square root
                of the number of ranks.
            clip_scope: What has one norm: each compressed tensor, or all gradients together, also before
                ``rampup_begin_step``.
            min_numel: Tensors of fewer elements are not compressed; they are sent as ``small`` says.
            include: Name patterns, as of ``fnmatch``, of tensors that are compressed although they are 1-D or small.
            exclude: Name patterns of tensors that are never compressed, and sent as float32.
            indices: How the positions of sent entries are coded.
            values: How the values of sent entries are coded.
            small: How tensors that are 1-D or small are coded; "float32" sends them as they are.
            bucket_bytes: Bytes of float32 gradient that are sent together in one message.
            op: Average, or Sum: Horovod's constant, or the name "average" or "sum".
            sparse_updates: Update only the received entries of the parameters where the optimizer is a plain SGD;
                False: all of them.
            hierarchical: The ranks of a node add up their gradients and send as one; "auto": where that saves traffic;
                or so many.
            transport: What carries the messages; "auto" takes MPI where Horovod runs on it, else Horovod or
                torch.distributed.
            loss_scale: By what the loss is multiplied: a number, a function that returns it, or the framework's loss
                scaler.
            process_set: Horovod's process set of the ranks that exchange; None: all ranks.

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
        sparsity: float | Sequence[float] = 0.99,
        rampup_step: int = 1,
        threshold: Literal["tensor", "global"] = "tensor",
        headroom: float = 1.5,
        indices: IndexCodec = "elias_fano",
        values: ValueCodec = "int2",
        **options: Unpack[EntryOptions],
    ) -> Compressor:
        """Send the entries above a threshold, the others wait in the residual.

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            sparsity: The share of entries that are held back in a step; a list is walked through during the ramp-up.
            rampup_step: The number of steps in which the list of sparsities is walked through.
            threshold: "tensor": the k largest entries of each tensor; "global": one threshold for all tensors.
            headroom: With a global threshold, room in a bucket's message for this many times the entries of an even
                share.
            indices: How the positions of sent entries are coded.
            values: How the values of sent entries are coded.
            **options: those of :class:`EntryOptions`, explained at :meth:`dgc`; ``small`` is "float32", ``momentum`` 0
                and ``momentum_masking`` False unless given.

        Source: Aji and Heafield 2017, arXiv 1704.05021.
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
        """Send entries beyond a fixed threshold as the threshold; what it does not say stays in the residual.

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            threshold: The τ of the paper, in units of the gradient; there is no value that suits all models.
            max_density: Room in a message, as a share of the elements; entries beyond it wait.
            **options: those of :class:`EntryOptions`, explained at :meth:`dgc`; ``small`` is "float32", ``momentum`` 0
                and ``momentum_masking`` False unless given.

        Source: Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech.
        """
        raise NotImplementedError

    @by_name
    def dryden(
        self,
        parameters: Tensors | None = None,
        optimizer: Optimizer | None = None,
        *,
        sparsity: float | Sequence[float] = 1 - 1 / 64,
        rampup_step: int = 1,
        **options: Unpack[EntryOptions],
    ) -> Compressor:
        """Send a fixed share of the positive and of the negative entries, each as its mean, with error feedback.

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            sparsity: The share of entries that are held back in a step; a list is walked through during the ramp-up.
            rampup_step: The number of steps in which the list of sparsities is walked through.
            **options: those of :class:`EntryOptions`, explained at :meth:`dgc`; ``small`` is "float32", ``momentum`` 0
                and ``momentum_masking`` False unless given.

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
        """Adaptive residual compression: a soft threshold in each bin, signs with one scale a tensor.

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            conv_bin: Elements in a bin, L_T, of a tensor with more than two dimensions; up to 63 an entry takes 8 bits.
            fc_bin: The same for a matrix.
            entries_per_bin: Room in a message: so many entries a bin on average; what finds no room waits.
            **options: those of :class:`EntryOptions`, explained at :meth:`dgc`; ``small`` is "float32", ``momentum`` 0
                and ``momentum_masking`` False unless given.

        The method is claimed in the patent US 11,295,208.

        Source: Chen et al. 2018, arXiv 1712.02679.
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
        """Send one bit an entry, its sign; entries of one sign become their mean, with error feedback.

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            means: What shares a pair of means: a "column" of the matrix (first dimension x all others), a "row" of it,
                or the whole "tensor".
            **options: those of :class:`FeedbackOptions`, explained at :meth:`dgc`; ``small`` is "float32" and
                ``momentum`` 0 unless given.

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

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            bits: 2, 4 or 8: s = 1, 7 or 127 levels of either sign.
            bucket_size: Elements that share a norm (the paper's bucket).
            norm: "l2" as in the paper's analysis, or "max" as in its experiments: less variance, fewer zeros.
            seed: Of the random numbers, which also depend on rank, step and tensor.
            **options: those of :class:`CommonOptions`, explained at :meth:`dgc`; ``small`` is "float32" unless given.

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
        """Ternary gradients: -1, 0 or 1 times one scale a tensor, at random and without bias, without error feedback.

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            clip_factor: Entries are cut at so many standard deviations of their tensor; None: not at all.
            seed: Of the random numbers, which also depend on rank, step and tensor.
            **options: those of :class:`CommonOptions`, explained at :meth:`dgc`; ``small`` is "float32" unless given.

        Source: Wen et al. 2017, arXiv 1705.07878.
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

        Args:
            parameters: as for :meth:`dgc`.
            optimizer: as for :meth:`dgc`.
            bits: k, 1 to 8. The paper finds that fewer than 4 hurt.
            seed: Of the random numbers, which also depend on rank, step and tensor.
            **options: those of :class:`CommonOptions`, explained at :meth:`dgc`; ``small`` is "float32" unless given.

        Source: Zhou et al. 2016, arXiv 1606.06160, equation 12.
        """
        raise NotImplementedError
