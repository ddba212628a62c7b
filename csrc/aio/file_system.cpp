#include "file_system.h"

#include <cstdio>

namespace infinity::aio {
namespace {

struct Known {
  uint32_t magic;
  const char* name;
  const char* why_buffered;  // empty where direct I/O usually works
};
constexpr Known kKnown[] = {
    {0xEF53, "ext4", ""},
    {0x58465342, "xfs", ""},
    {0x9123683E, "btrfs", ""},
    {0xF2F52010, "f2fs", ""},
    {0xCA451A4E, "bcachefs", ""},
    {0x6969, "nfs", "the server or the mount options do not take it"},
    {0x0BD00BD0, "lustre", ""},
    {0x01021994, "tmpfs", "it lives in memory"},
    {0x858458F6, "ramfs", "it lives in memory"},
    {0x794C7630, "overlayfs", "the layer below does not take it; use a volume or a bind mount"},
    {0x65735546, "fuse", "its server does not take it"},
    {0x2FC12FC1, "zfs", "it needs OpenZFS 2.3 with the property direct=standard"},
    {0xFF534D42, "cifs", "the mount options do not take it"},
    {0xFE534D42, "smb2", "the mount options do not take it"},
    {0x01021997, "9p", "it is shared by a virtual machine's host; use a virtual disk"},
    {0x9FA0, "proc", "it is made up by the kernel"},
};

}  // namespace

std::string file_system_name(int64_t magic) {
  for (const Known& known : kKnown) {
    if (known.magic == magic) return known.name;
  }
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(magic));
  return text;
}

std::string no_direct_reason(const std::string& file_system) {
  std::string reason = file_system + " offers no direct I/O for this file";
  for (const Known& known : kKnown) {
    if (file_system == known.name && *known.why_buffered != '\0') {
      reason += std::string(": ") + known.why_buffered;
    }
  }
  return reason;
}

}  // namespace infinity::aio
