//! nanotron's `parallelism:` section, read as it stands (feature `config`).
//!
//! The names and their defaults are those of nanotron's `ParallelismArgs`. What this crate cannot honour is refused by name, rather
//! than left out; a misspelt key is, too, with the one that was probably meant.

use std::fmt;

use saphyr_parser::{Event, Parser, ScalarStyle};

use crate::embedding::EmbeddingBuilder;
use crate::linear::{LinearBuilder, LinearLayer};
use crate::{Error, Float, Group, LinearMode, Mesh, Overlap, Result};

/// The order in which a pipeline's micro-batches go: for the program's own pipeline to follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PipelineSchedule {
    /// `1f1b`: one forward, one backward.
    OneForwardOneBackward,
    /// `afab`: all forward, all backward.
    AllForwardAllBackward,
}

/// How a model is spread over ranks: the `parallelism:` section of a nanotron configuration.
///
/// ```
/// use async_tensor_parallel::{LinearMode, LocalWorld, Overlap, ParallelismConfig, TensorParallelColumnLinear};
///
/// let config = ParallelismConfig::from_yaml(
///     "parallelism: {dp: 1, pp: 1, tp: 2, tp_mode: REDUCE_SCATTER, tp_linear_async_communication: true}",
/// )?;
/// assert_eq!((config.tp, config.tp_mode, config.overlap()), (2, LinearMode::ReduceScatter, Overlap::Async));
/// LocalWorld::new(config.world_size())?.run(|world| {
///     let mesh = config.mesh(world)?;
///     let layer = config.linear(TensorParallelColumnLinear::<f32>::builder(8, 16)).build(mesh.tp())?;
///     assert_eq!(layer.config().mode, LinearMode::ReduceScatter);
///     Ok(())
/// })?;
/// # Ok::<(), async_tensor_parallel::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParallelismConfig {
    /// Data-parallel size.
    pub dp: usize,
    /// Pipeline-parallel size.
    pub pp: usize,
    /// Tensor-parallel size.
    pub tp: usize,
    /// `tp_mode`; `ALL_REDUCE` where it is missing or null.
    pub tp_mode: LinearMode,
    /// `tp_linear_async_communication`; false where it is missing or null.
    pub tp_linear_async_communication: bool,
    /// `tp_recompute_allgather`; true where it is missing.
    pub tp_recompute_allgather: bool,
    /// `pp_engine`; `1f1b` where it is missing or null.
    pub pp_engine: PipelineSchedule,
}

const KEYS: [&str; 10] = [
    "dp",
    "pp",
    "tp",
    "pp_engine",
    "tp_mode",
    "tp_linear_async_communication",
    "recompute_layer",
    "tp_recompute_allgather",
    "expert_parallel_size",
    "context_parallel_size",
];

impl ParallelismConfig {
    /// Reads a nanotron configuration: a whole one, of which the top-level section `parallelism` counts, or that section's content
    /// alone.
    ///
    /// # Errors
    /// [`Error::Config`] for text that is not YAML, a key that is missing or unknown, a value of the wrong kind;
    /// [`Error::Unsupported`] for what this crate cannot honour: `recompute_layer`, and expert or context parallelism.
    pub fn from_yaml(text: &str) -> Result<Self> {
        let mut events = Events { parser: Parser::new_from_str(text) };
        let mut entries =
            events.document()?.ok_or_else(|| wrong("file", "no mapping", "one, of sections or of their keys"))?;
        if let Some(at) = entries.iter().position(|(key, _)| key == "parallelism") {
            if entries[at + 1..].iter().any(|(key, _)| key == "parallelism") {
                return Err(wrong("parallelism", "two of them", "one"));
            }
            return match entries.swap_remove(at).1 {
                Value::Section(section) => Self::from_section(&section),
                other => Err(wrong("parallelism", other, "a mapping")),
            };
        }
        Self::from_section(&entries)
    }

    fn from_section(section: &[(String, Value)]) -> Result<Self> {
        for (at, (key, _)) in section.iter().enumerate() {
            if !KEYS.contains(&&**key) {
                return Err(unknown(key));
            }
            if section[..at].iter().any(|(earlier, _)| earlier == key) {
                return Err(wrong(key, "two of them", "one"));
            }
        }
        // Null is as good as missing, as in nanotron.
        let get = |key: &str| {
            let found = section.iter().find(|(name, _)| name == key);
            found.map(|(_, value)| value).filter(|value| !value.is_null())
        };
        let size = |key: &str, missing: Option<usize>| match (get(key), missing) {
            (None, Some(value)) => Ok(value),
            (None, None) => Err(wrong(key, "nothing", "a number of ranks")),
            (Some(value), _) => {
                let number = value.plain().filter(|text| !text.starts_with('0')).and_then(|text| text.parse().ok());
                let number = number.filter(|number| (1..=1 << 24).contains(number));
                number.ok_or_else(|| wrong(key, value, "a number of ranks, 1 or more"))
            }
        };
        let flag = |key: &str, missing: bool| match get(key) {
            None => Ok(missing),
            Some(value) => value.flag().ok_or_else(|| wrong(key, value, "true or false")),
        };
        let word = |key: &str, missing: &str| get(key).map_or(missing.to_string(), Value::word);
        if flag("recompute_layer", false)? {
            return Err(Error::Unsupported {
                what: "parallelism.recompute_layer: true".into(),
                reason: "what a model's blocks keep for backward is the model's own affair".into(),
            });
        }
        for (key, what) in [("expert_parallel_size", "experts"), ("context_parallel_size", "sequences")] {
            let ranks = size(key, Some(1))?;
            if ranks != 1 {
                return Err(Error::Unsupported {
                    what: format!("parallelism.{key}: {ranks}"),
                    reason: format!("{what} are not spread over ranks by this crate"),
                });
            }
        }
        let tp_mode = match &*word("tp_mode", "ALL_REDUCE") {
            "ALL_REDUCE" => LinearMode::AllReduce,
            "REDUCE_SCATTER" => LinearMode::ReduceScatter,
            other => return Err(wrong("tp_mode", other, "ALL_REDUCE or REDUCE_SCATTER")),
        };
        let pp_engine = match &*word("pp_engine", "1f1b") {
            "1f1b" => PipelineSchedule::OneForwardOneBackward,
            "afab" => PipelineSchedule::AllForwardAllBackward,
            other => return Err(wrong("pp_engine", other, "1f1b or afab")),
        };
        let config = Self {
            dp: size("dp", None)?,
            pp: size("pp", None)?,
            tp: size("tp", None)?,
            tp_mode,
            tp_linear_async_communication: flag("tp_linear_async_communication", false)?,
            tp_recompute_allgather: flag("tp_recompute_allgather", true)?,
            pp_engine,
        };
        let ranks = [config.dp, config.pp, config.tp].iter().try_fold(1usize, |all, size| all.checked_mul(*size));
        ranks.map(|_| config.clone()).ok_or_else(|| wrong("dp, pp and tp", config, "sizes whose product is a number"))
    }

    /// Ranks in all.
    pub fn world_size(&self) -> usize {
        self.dp * self.pp * self.tp
    }

    /// [`Overlap::Async`] where `tp_linear_async_communication` is set, which is what nanotron does; else [`Overlap::Blocking`].
    pub fn overlap(&self) -> Overlap {
        if self.tp_linear_async_communication { Overlap::Async } else { Overlap::Blocking }
    }

    /// The groups of `world`.
    ///
    /// # Errors
    /// As [`Mesh::new`].
    pub fn mesh(&self, world: &Group) -> Result<Mesh> {
        Mesh::new(world, self.dp, self.pp, self.tp)
    }

    /// Gives a column or row layer these modes.
    pub fn linear<L: LinearLayer>(&self, builder: LinearBuilder<L>) -> LinearBuilder<L> {
        builder.mode(self.tp_mode).overlap(self.overlap()).recompute_all_gather(self.tp_recompute_allgather)
    }

    /// Gives an embedding these modes.
    pub fn embedding<T: Float>(&self, builder: EmbeddingBuilder<T>) -> EmbeddingBuilder<T> {
        builder.mode(self.tp_mode).overlap(self.overlap())
    }
}

impl fmt::Display for ParallelismConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dp {}, pp {}, tp {}", self.dp, self.pp, self.tp)
    }
}

fn wrong(key: &str, got: impl fmt::Display, wanted: &str) -> Error {
    Error::Config { key: key.into(), got: got.to_string(), wanted: wanted.into() }
}

fn unknown(key: &str) -> Error {
    let nearest = KEYS.iter().min_by_key(|known| distance(known, key));
    wrong("parallelism", key, &format!("a known key; the nearest is {}", nearest.unwrap_or(&"")))
}

/// What stands beside a key.
#[derive(Debug)]
enum Value {
    Plain(String),
    Quoted(String),
    /// A mapping at the top level.
    Section(Vec<(String, Value)>),
    /// What no key of ours has.
    Other(&'static str),
}

impl Value {
    fn plain(&self) -> Option<&str> {
        if let Value::Plain(text) = self { Some(text) } else { None }
    }

    /// The text, quoted or not.
    fn word(&self) -> String {
        match self {
            Value::Plain(text) | Value::Quoted(text) => text.clone(),
            other => other.to_string(),
        }
    }

    fn is_null(&self) -> bool {
        self.plain().is_some_and(|text| ["", "~", "null", "Null", "NULL"].contains(&text))
    }

    /// As PyYAML reads it, which nanotron uses: YAML 1.1.
    fn flag(&self) -> Option<bool> {
        match &*self.plain()?.to_ascii_lowercase() {
            "true" | "yes" | "on" => Some(true),
            "false" | "no" | "off" => Some(false),
            _ => None,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Plain(text) => f.write_str(text),
            Value::Quoted(text) => write!(f, "{text:?}"),
            Value::Section(_) => f.write_str("a mapping"),
            Value::Other(what) => f.write_str(what),
        }
    }
}

/// The parser's events. Two levels of mappings are kept; what lies deeper, however deep, is passed over, and aliases are not
/// followed: a hostile file costs no more than its length.
struct Events<'a> {
    parser: Parser<'a, saphyr_parser::StrInput<'a>>,
}

impl<'a> Events<'a> {
    fn next(&mut self) -> Result<Event<'a>> {
        match self.parser.next_event() {
            Some(Ok((event, _))) => Ok(event),
            Some(Err(error)) => Err(wrong("file", error, "YAML")),
            None => Ok(Event::StreamEnd),
        }
    }

    /// The only document, if it is a mapping.
    fn document(&mut self) -> Result<Option<Vec<(String, Value)>>> {
        let mut found = None;
        loop {
            match self.next()? {
                Event::StreamEnd => return Ok(found),
                Event::DocumentStart(_) if found.is_some() => return Err(wrong("file", "several documents", "one")),
                Event::MappingStart(..) => found = Some(self.mapping(0)?),
                event => self.skip(&event)?,
            }
        }
    }

    /// The rest of a mapping that is so deep.
    fn mapping(&mut self, depth: usize) -> Result<Vec<(String, Value)>> {
        let mut entries = Vec::new();
        loop {
            let key = match self.next()? {
                Event::MappingEnd => return Ok(entries),
                event => self.value(event, usize::MAX)?,
            };
            let event = self.next()?;
            let value = self.value(event, depth)?;
            entries.push((key.word(), value));
        }
    }

    /// The value that begins so.
    fn value(&mut self, event: Event<'a>, depth: usize) -> Result<Value> {
        Ok(match event {
            Event::Scalar(text, ScalarStyle::Plain, _, None) => Value::Plain(short(&text)),
            Event::Scalar(text, ..) => Value::Quoted(short(&text)),
            Event::MappingStart(..) if depth == 0 => Value::Section(self.mapping(1)?),
            event => {
                self.skip(&event)?;
                match event {
                    Event::MappingStart(..) => Value::Other("a mapping"),
                    Event::SequenceStart(..) => Value::Other("a sequence"),
                    _ => Value::Other("an alias"),
                }
            }
        })
    }

    /// Passes over what begins with `event`.
    fn skip(&mut self, event: &Event<'_>) -> Result<()> {
        let opens = |event: &Event<'_>| matches!(event, Event::MappingStart(..) | Event::SequenceStart(..));
        let mut depth = usize::from(opens(event));
        while depth > 0 {
            let event = self.next()?;
            match event {
                Event::MappingEnd | Event::SequenceEnd => depth -= 1,
                Event::StreamEnd => return Err(wrong("file", "an end within a value", "YAML")),
                event => depth += usize::from(opens(&event)),
            }
        }
        Ok(())
    }
}

/// As much of a text as an error message needs, and any known key.
fn short(text: &str) -> String {
    text.chars().take(60).collect()
}

/// How many characters must be put in, left out or changed to get from one to the other (Levenshtein 1966).
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.chars().enumerate() {
            let changed = corner + usize::from(x != y);
            corner = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(corner + 1);
        }
    }
    row[b.chars().count()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(section: &str) -> Result<ParallelismConfig> {
        ParallelismConfig::from_yaml(&format!("general: {{run: x}}\nparallelism:\n{section}"))
    }

    /// The sections of nanotron's `mup_350m_llama_config.yaml` and `sp_350m_llama_config.yaml`, with what stands around them that
    /// could be mistaken: another section of that name, further in.
    #[test]
    fn nanotrons_own_files() {
        let section = "  dp: 4\n  pp: 1\n  pp_engine: 1f1b\n  tp: 2\n  tp_linear_async_communication: true\n  \
                       tp_mode: REDUCE_SCATTER\n";
        let evaluation = "lighteval:\n  parallelism:\n    dp: 2\n    expert_parallel_size: 1\n    pp: 1\n    pp_engine: 1f1b\n    \
                          tp: 2\n    tp_linear_async_communication: false\n    tp_mode: ALL_REDUCE\n  wandb: null\n";
        for rest in ["profiler: null\n", evaluation] {
            for text in [format!("{rest}parallelism:\n{section}"), format!("parallelism:\n{section}{rest}")] {
                let config = ParallelismConfig::from_yaml(&text).unwrap();
                assert_eq!((config.dp, config.pp, config.tp, config.world_size()), (4, 1, 2, 8));
                assert_eq!(config.tp_mode, LinearMode::ReduceScatter);
                assert_eq!(config.overlap(), Overlap::Async);
                assert_eq!(config.pp_engine, PipelineSchedule::OneForwardOneBackward);
                assert!(config.tp_recompute_allgather);
                crate::LocalWorld::new(8)
                    .unwrap()
                    .run(|world| {
                        let mesh = config.mesh(world)?;
                        assert_eq!((mesh.dp().world_size(), mesh.tp().world_size()), (4, 2));
                        let builder = crate::TensorParallelColumnLinear::<f32>::builder(4, 4);
                        let layer = config.linear(builder).build(mesh.tp())?;
                        let got = layer.config();
                        assert_eq!((got.mode, got.overlap), (LinearMode::ReduceScatter, Overlap::Async));
                        let embedding = config.embedding(crate::TensorParallelEmbedding::<f32>::builder(6, 4));
                        assert_eq!(embedding.build(mesh.tp())?.config().mode, LinearMode::ReduceScatter);
                        Ok(())
                    })
                    .unwrap();
            }
        }
    }

    #[test]
    fn what_is_missing_or_null_has_nanotrons_defaults() {
        let config =
            read("  {dp: 1, pp: 2, tp: 3, tp_mode: null, pp_engine: ~, tp_linear_async_communication: null}").unwrap();
        assert_eq!(config.tp_mode, LinearMode::AllReduce);
        assert_eq!(config.overlap(), Overlap::Blocking);
        assert!(config.tp_recompute_allgather);
        assert_eq!(ParallelismConfig::from_yaml("dp: 1\npp: 2\ntp: 3\n").unwrap(), config);
        let all = "{'dp': 1, \"pp\": 1, tp: 1, pp_engine: 'afab', tp_mode: \"ALL_REDUCE\", tp_linear_async_communication: false, \
                   recompute_layer: false, tp_recompute_allgather: false, expert_parallel_size: 1, context_parallel_size: 1}";
        let config = read(&format!("  {all}")).unwrap();
        assert!(!config.tp_recompute_allgather && config.pp_engine == PipelineSchedule::AllForwardAllBackward);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (section, words) in [
            ("  {dp: 1, pp: 1}", ["tp", "nothing"]),
            ("  {dp: 1, pp: 1, tp: 0}", ["tp", "0"]),
            ("  {dp: 1, pp: 1, tp: -2}", ["tp", "-2"]),
            ("  {dp: 1, pp: 1, tp: 010}", ["tp", "010"]),
            ("  {dp: 1, pp: 1, tp: 2.5}", ["tp", "2.5"]),
            ("  {dp: 1, pp: 1, tp: two}", ["tp", "two"]),
            ("  {dp: 16777216, pp: 16777216, tp: 16777216}", ["dp, pp and tp", "16777216"]),
            ("  {dp: 1, pp: 1, tp: 99999999999999999999999}", ["tp", "1 or more"]),
            ("  {dp: 1, pp: 1, tp: 1, tp_mode: reduce_scatter}", ["tp_mode", "REDUCE_SCATTER"]),
            ("  {dp: 1, pp: 1, tp: 1, tp_mode: [1]}", ["tp_mode", "a sequence"]),
            ("  {dp: 1, pp: 1, tp: 1, pp_engine: zero_bubble}", ["pp_engine", "zero_bubble"]),
            (
                "  {dp: 1, pp: 1, tp: 1, tp_linear_async_communication: 1}",
                ["tp_linear_async_communication", "true or false"],
            ),
            (
                "  {dp: 1, pp: 1, tp: 1, tp_linear_async_comunication: true}",
                ["comunication", "tp_linear_async_communication"],
            ),
            ("  {dp: 1, pp: 1, tp: 1, 7: true}", ["7", "known key"]),
            ("  {dp: 1, pp: 1, tp: 1, expert_parallel_size: 2}", ["expert_parallel_size: 2", "not supported"]),
            ("  {dp: 1, pp: 1, tp: 1, context_parallel_size: 4}", ["context_parallel_size: 4", "not supported"]),
            ("  {dp: 1, pp: 1, tp: 1, recompute_layer: true}", ["recompute_layer", "not supported"]),
            ("  [1, 2]", ["parallelism", "sequence"]),
            ("  {dp: 1, dp: 2, pp: 1, tp: 1}", ["dp", "two of them"]),
            ("  {dp: 1, pp: 1, tp: \"2\"}", ["tp", "\"2\""]),
            ("  {dp: 1, pp: 1, tp: *x}", ["file", "YAML"]),
            ("  {dp: 1", ["file", "YAML"]),
        ] {
            let text = read(section).unwrap_err().to_string();
            assert!(words.iter().all(|word| text.contains(word)), "{section}: {text}");
        }
        for text in ["", "- 1\n", "parallelism: null\n", "a: 1\n---\nb: 2\n", "*x", "\u{0}", "general: {run: x}\n"] {
            ParallelismConfig::from_yaml(text).unwrap_err();
        }
    }

    #[test]
    fn nesting_without_end_and_aliases_of_aliases_are_answered() {
        for open in ["[", "{a: ", "- "] {
            assert!(ParallelismConfig::from_yaml(&open.repeat(100_000)).is_err());
        }
        let mut bomb = String::from("a: &a [x, x, x, x, x, x, x, x, x]\n");
        for (name, of) in "bcdefghijklm".chars().zip("abcdefghijkl".chars()) {
            bomb += &format!("{name}: &{name} [*{of}, *{of}, *{of}, *{of}, *{of}, *{of}, *{of}, *{of}, *{of}]\n");
        }
        ParallelismConfig::from_yaml(&bomb).unwrap_err();
    }

    proptest::proptest! {
        #[test]
        fn anything_is_an_answer(text in "(parallelism:)?[ \n{}:,\\[\\]a-z0-9&*!|>#'\"-]{0,60}") {
            let _ = ParallelismConfig::from_yaml(&text);
        }
    }
}
