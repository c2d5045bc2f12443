"""A package index on the loopback that has a package `probe`, and misbehaves. Usage: package_index.py WHAT PORT-FILE

It is one of pip's and one of apt's. WHAT says what happens to the first requests for a file, that of the package or apt's
list, as in drop,cut,late: the connection ends without an answer, it ends within the file, the answer comes after 1.5 s.
Later ones are answered. Where WHAT is silent nothing ever is. Writes its port
to PORT-FILE. Ends when its input does, or after a minute.
"""

import http.server
import io
import os
import sys
import threading
import time
import zipfile

NAME = "probe-1.0-py3-none-any.whl"
LIST = b"""Package: probe
Version: 1.0
Architecture: all
Filename: probe.deb
Size: 1
SHA256: 6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b
"""


def wheel():
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("probe.py", "answer = 42\n")
        archive.writestr("probe-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n")
        archive.writestr("probe-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("probe-1.0.dist-info/RECORD", "")
    return data.getvalue()


class Index(http.server.BaseHTTPRequestHandler):
    faults = []

    def do_GET(self):
        page = f'<!DOCTYPE html><html><body><a href="/{NAME}">{NAME}</a></body></html>'.encode()
        is_list = self.path.endswith("/Packages")
        is_file = is_list or self.path.endswith(".whl")
        body = LIST if is_list else wheel() if is_file else page
        if "Release" in self.path or "Packages." in self.path:  # apt takes the plain list then
            self.send_error(404)
            return
        if self.faults == ["silent"]:
            time.sleep(60)
            return
        fault = self.faults.pop(0) if is_file and self.faults else ""
        if fault == "drop":
            return
        if fault == "late":
            time.sleep(1.5)
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream" if is_file else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body[:100] if fault == "cut" else body)
        except OSError:
            pass  # who asked has given up

    def log_message(self, *arguments):
        pass


def main():
    Index.faults = sys.argv[1].split(",")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with open(sys.argv[2] + ".new", "w") as file:
        file.write(str(server.server_address[1]))
    os.rename(sys.argv[2] + ".new", sys.argv[2])
    threading.Thread(target=lambda: (time.sleep(60), os._exit(1)), daemon=True).start()
    sys.stdin.read()


main()
