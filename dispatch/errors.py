"""Every error that Gristmill raises: one class per mistake, each message with what was found and what would work."""


class GristmillError(Exception):
    """Base of all errors below."""


class ArgumentError(GristmillError, ValueError):
    """A tensor or value given to a public function breaks its contract."""


class ShapeError(ArgumentError):
    """A tensor has the wrong rank or extent."""


class DTypeError(ArgumentError):
    """A tensor has a dtype that the function does not take."""


class StrideError(ArgumentError):
    """A tensor's inner stride is not one element, or its rows overlap where they must not."""


class DeviceMismatchError(ArgumentError):
    """Tensors of one call lie on different devices."""


class FormulaError(GristmillError, ValueError):
    """A formula of a manifest is not in the formula language, or cannot be evaluated."""


class CheckpointError(GristmillError):
    """A checkpoint file is damaged, cut short, or holds what the reader does not support."""


class CertificateError(GristmillError):
    """A file is not a certificate of coverage."""


class PackError(GristmillError):
    """Base of what can be wrong with a pack."""


class NoPackError(PackError):
    """No installed pack serves the device."""


class PackSchemaError(PackError):
    """Base of the two ways in which a pack and this dispatcher are of different times."""


class PackTooNewError(PackSchemaError):
    """A manifest has a schema number above the one that this dispatcher reads."""


class PackTooOldError(PackSchemaError):
    """A manifest has a schema number below the one that this dispatcher reads."""


class DamagedPackError(PackError):
    """A file of a pack is missing, cut short or altered."""


class ManifestError(DamagedPackError):
    """A manifest is not valid."""


class NoKernelError(GristmillError):
    """No entry of the pack covers the problem; the message has one reason per candidate."""


class DriverError(GristmillError):
    """A driver call failed; the message names the call, the driver's text, the symbol and the arch."""


class NoDriverError(GristmillError):
    """The driver library or its Python package cannot be loaded."""


class NoDeviceError(GristmillError):
    """The driver works but sees no such device."""


class ForkedProcessError(GristmillError):
    """The process is a fork of one that had used the driver; nothing of the driver works in it."""


class NotLoadedError(GristmillError):
    """A kernel would have to be loaded during stream capture; `preload` was not called."""


class PreloadLimitError(GristmillError):
    """More device code would have to be loaded than `preload` was allowed; nothing has been loaded."""


class StrictModeError(GristmillError):
    """Strict mode is on, and something was about to compile, start a process, open a socket or write a file."""
