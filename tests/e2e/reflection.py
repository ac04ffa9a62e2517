#!/usr/bin/env python3
"""A gRPC client that knows no .proto file: it asks the server for its descriptors, as grpcurl does. As a command:

reflection.py HOST:PORT                              lists every method
reflection.py HOST:PORT PACKAGE.SERVICE/METHOD JSON  calls one (an empty request without JSON), prints the answer
"""

import json
import sys

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


class ReflectedServer:
    def __init__(self, address):
        self.channel = grpc.insecure_channel(address)
        self.database = ProtoReflectionDescriptorDatabase(self.channel)
        self.pool = descriptor_pool.DescriptorPool(self.database)

    def services(self):
        return sorted(self.database.get_services())

    def methods(self, service):
        return [method.name for method in self.pool.FindServiceByName(service).methods]

    def call(self, method, request=None):
        """`method` is "package.Service/Method"; the answer of a unary call as a dict."""
        service, name = method.split("/")
        descriptor = self.pool.FindServiceByName(service).methods_by_name[name]
        request_class = message_factory.GetMessageClass(descriptor.input_type)
        reply_class = message_factory.GetMessageClass(descriptor.output_type)
        stub = self.channel.unary_unary(f"/{method}", request_serializer=request_class.SerializeToString,
                                        response_deserializer=reply_class.FromString)
        reply = stub(json_format.ParseDict(request or {}, request_class()), timeout=10)
        return json_format.MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

    def health(self):
        """grpc.health.v1 is part of gRPC itself and not in the server's descriptors: an empty request, field 1 of the answer."""
        check = self.channel.unary_unary("/grpc.health.v1.Health/Check", request_serializer=bytes, response_deserializer=bytes)
        return {b"\x08\x01": "SERVING", b"\x08\x02": "NOT_SERVING"}.get(check(b"", timeout=10), "UNKNOWN")

    def close(self):
        self.channel.close()


def main(arguments):
    if not 1 <= len(arguments) <= 3 or arguments[0].startswith("-"):
        print(__doc__)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 78
    address, *rest = arguments
    server = ReflectedServer(address)
    try:
        if rest:
            print(json.dumps(server.call(rest[0], json.loads(rest[1]) if rest[1:] else {}), indent=2))
            return 0
        for service in server.services():
            if not service.startswith("grpc."):
                for name in server.methods(service):
                    print(f"{service}/{name}")
        return 0
    except grpc.RpcError as error:
        print(f"{address}: {error.code().name}: {error.details()}", file=sys.stderr)
    except (KeyError, ValueError) as error:  # not in the descriptors; not PACKAGE.SERVICE/METHOD; not JSON
        print(f"{address}: {error}; without a method this lists what there is", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
