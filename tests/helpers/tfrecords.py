"""Writes TFRecord files for tests, without any code of the reader."""

import struct


def _crc_table():
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # CRC-32C, Castagnoli
        table.append(value)
    return table


_TABLE = _crc_table()


def masked_crc(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15) + (crc << 17) + 0xA282EAD8) % 2**32


def framed(data):
    length = struct.pack("<Q", len(data))
    crcs = [struct.pack("<I", masked_crc(part)) for part in (length, data)]
    return length + crcs[0] + data + crcs[1]


def varint(number):
    number %= 2**64  # negative ones are two's complement
    out = bytearray()
    while number > 127:
        out.append(number % 128 + 128)
        number //= 128
    return bytes([*out, number])


def field(number, data):
    """Encodes a length-delimited field."""
    return varint(number * 8 + 2) + varint(len(data)) + data


def feature(kind, values, packed=True):
    if kind == "bytes":
        return field(1, b"".join(field(1, value) for value in values))
    numbers = [struct.pack("<f", v) if kind == "float32" else varint(v) for v in values]
    wire_type = 5 if kind == "float32" else 0
    if packed:
        content = field(1, b"".join(numbers)) if values else b""
    else:
        content = b"".join(varint(8 + wire_type) + number for number in numbers)
    return field({"float32": 2, "int64": 3}[kind], content)


def example(features):
    """Encodes a tf.Example of {name: serialized feature}, in the order of the dict."""
    entries = [field(1, field(1, name.encode()) + field(2, f)) for name, f in features.items()]
    return field(1, b"".join(entries))


def write_file(path, records):
    path.write_bytes(b"".join(map(framed, records)))
    return str(path)
